"""What a decoder needs on a machine, from its configuration alone: `semkv plan`."""
