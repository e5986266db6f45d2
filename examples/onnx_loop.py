"""Go on from a prompt in stock onnxruntime: export a decode step and a state, then run them where semkv is not imported.

python examples/onnx_loop.py                 exports the bundled model, and runs this file again on what it wrote
python examples/onnx_loop.py FOLDER TOKENS   the host: numpy, onnxruntime and safetensors alone
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path


def decode(folder: Path, tokens: int) -> list[list[int]]:
    """The tokens of each row that follow the state in `folder`."""
    import numpy
    import onnxruntime
    from safetensors.numpy import load_file

    step = json.loads((folder / "step.json").read_text())
    session = onnxruntime.InferenceSession(folder / step["file"], providers=["CPUExecutionProvider"])
    held = load_file(folder / "state.safetensors")
    feeds = {tensor["name"]: held[tensor["name"]] for tensor in step["inputs"]}
    made = [feeds["ids"]]
    while len(made) < tokens:
        outputs = session.run([tensor["name"] for tensor in step["outputs"]], feeds)
        for tensor, value in zip(step["outputs"], outputs):
            if tensor["replaces"] is not None:
                feeds[tensor["replaces"]] = value
        feeds["ids"] = outputs[0].argmax(-1)[:, None]
        made.append(feeds["ids"])
    return numpy.concatenate(made, 1).tolist()


def export(folder: Path, tokens: int) -> None:
    """Export the bundled model with a tenth of its memory, run the host, and compare."""
    import semkv
    from semkv.profiles.bundled.tasks import make_haystack

    model, tokenizer = semkv.bundled.load()
    compiled = semkv.compile(model, semkv.bundled.profile(), method="quest", budget=0.25)
    compiled.export(folder)
    prompt = tokenizer(make_haystack("single", 1200, seed=1).context, return_tensors="pt").input_ids
    state = compiled.prefill(prompt)
    state.reserve(tokens)
    compiled.export_state(state, folder / "state.safetensors")
    print(", ".join(f"{file.name} {file.stat().st_size / 1e6:.1f} MB" for file in sorted(folder.iterdir())))

    host = subprocess.run(
        [sys.executable, __file__, str(folder), str(tokens)], capture_output=True, text=True, check=True
    )
    theirs = json.loads(host.stdout)[0]
    ours = compiled.generate(
        state=state, inputs=state.logits.argmax(-1, keepdim=True), max_new_tokens=tokens - 1, do_sample=False
    )
    print("semkv:      ", tokenizer.decode(ours[0]))
    print("onnxruntime:", tokenizer.decode(theirs))
    assert ours[0].tolist() == theirs


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(json.dumps(decode(Path(sys.argv[1]), int(sys.argv[2]))))
    else:
        with tempfile.TemporaryDirectory() as made:
            export(Path(made) / "bundled.step", 24)
