"""Compiled programs, weights and states as files: data only, checked before use, loadable without modelling code.

What the rest of semkv calls:

`save.save_program(program, path, method=, budget=, config=, profile=, ...)` and
    `load.load_program(path, device)` -> (Program, Manifest): compiled models.
`state_file.save_tensors(path, kind, meta, tensors, fingerprint=)` and
    `state_file.load_tensors(path, kind, fingerprint)` -> (meta, tensors): states, and other tensors with a description.
`fingerprint.model_fingerprint(model)`, carried by profiles, and `fingerprint.program_fingerprint(program)`, by states.
"""
