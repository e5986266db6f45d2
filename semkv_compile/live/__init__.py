"""The user's model after its compilation: it lives on, and a compiled model follows it or refuses."""
