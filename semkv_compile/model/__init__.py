"""What the user's model is made of: wrappers, tensors that wrap others, what Hugging Face calls things."""
