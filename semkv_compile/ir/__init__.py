"""What programs are made of: attention sites, operators, stages, and the protocol between a program and its memory."""
