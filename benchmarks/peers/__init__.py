"""kvpress and semkv on the same model, contexts and questions."""
