"""What an answer must not have: found after it was given, or, where a key asks for that, before each sentence is."""
