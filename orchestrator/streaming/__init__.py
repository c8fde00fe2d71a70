"""From token ids to OpenAI's events: detokenising, stop strings, chunks."""
