"""The bundled model: a small Llama that answers from long contexts, its tasks, its recipe and its measured accuracy."""

from pathlib import Path

MODEL_DIR = Path(__file__).parent / "model"
"""Folder with the weights and tokenizer: ``AutoModelForCausalLM.from_pretrained(MODEL_DIR)``."""
