"""Which tier a conversation needs: pure, no I/O but the reading of a tokenizer."""
