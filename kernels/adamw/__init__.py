"""AdamW over all parameters in one launch."""
