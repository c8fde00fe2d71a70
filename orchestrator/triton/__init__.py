"""Everything that knows Triton: starting it, and the two kinds of model it loads."""
