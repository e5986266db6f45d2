"""Processes that share a model: torchrun --nproc-per-node 2 examples/tensor_parallel.py"""

import torch
import torch.distributed as dist

import semkv
from semkv.profiles.bundled.tasks import make_haystack

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
group, device = dist.group.WORLD, None
if torch.cuda.is_available():
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)

model, tokenizer = semkv.bundled.load()
compiled = semkv.compile(model, method="snapkv", budget=0.2, device=device, group=group)
prompt = tokenizer(make_haystack("single", 600, seed=1).context, return_tensors="pt").input_ids
state = compiled.prefill(prompt)  # every process reads the same tokens
out = compiled.generate(prompt[:, -1:], state=state, max_new_tokens=8, do_sample=False, pad_token_id=0)

whole = sum(weight.numel() for weight in model.parameters())
own = sum({id(x): x.numel() for x in compiled.program.body.parameters()}.values())
print(
    f"process {dist.get_rank()}: {own / whole:.0%} of the weights in the body, {state.nbytes['device']:.0f} bytes of KV"
)
if dist.get_rank() == 0:
    print(tokenizer.decode(out[0]))
dist.destroy_process_group()
