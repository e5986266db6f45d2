"""Reading a prompt into a record, which memories are built from."""
