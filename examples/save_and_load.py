"""Save a compiled model and run it again without the modelling code that it was made from."""

import subprocess
import sys
import tempfile
from pathlib import Path

import semkv
from semkv.profiles.bundled.tasks import make_haystack

LATER = """
import sys, torch, semkv
compiled = semkv.load(sys.argv[1])
prompt = torch.tensor([[int(word) for word in sys.argv[2].split(",")]])
out = compiled.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)
print(",".join(str(token) for token in out[0].tolist()))
assert not any(name.startswith("transformers.models.llama") for name in sys.modules)
"""

model, tokenizer = semkv.bundled.load()
compiled = semkv.compile(model, semkv.bundled.profile(), method="sekv", budget=0.20)
prompt = tokenizer(make_haystack("single", 600, seed=1).context, return_tensors="pt").input_ids
now = compiled.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)[0].tolist()

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "bundled.semkv"
    compiled.save(path)
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    print(f"saved {size / 1e6:.1f} MB: {', '.join(sorted(file.name for file in path.iterdir()))}")
    arguments = [sys.executable, "-c", LATER, str(path), ",".join(map(str, prompt[0].tolist()))]
    later = [int(t) for t in subprocess.run(arguments, capture_output=True, text=True, check=True).stdout.split(",")]

print("in this process:   ", tokenizer.decode(now[prompt.shape[1] :]))
print("in a fresh process:", tokenizer.decode(later[prompt.shape[1] :]))
assert now == later
