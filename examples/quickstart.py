"""Compile the bundled model to a tenth of its KV memory and ask it something about a long text."""

import torch

import semkv
from semkv.profiles.bundled.tasks import make_haystack

model, tokenizer = semkv.bundled.load()
profile = semkv.bundled.profile()
compiled = semkv.compile(model, profile, method="sekv", budget=0.10)

# A text of about 3000 tokens in which every sentence could be asked for, and one question about it.
haystack = make_haystack("confusable", 3000, seed=5)
question = haystack.questions[0]
prompt = tokenizer(haystack.context + question.text, return_tensors="pt").input_ids

new = len(question.answer.split())
full = model.generate(prompt, max_new_tokens=new, do_sample=False, pad_token_id=tokenizer.pad_token_id)
short = compiled.generate(prompt, max_new_tokens=new, do_sample=False, pad_token_id=tokenizer.pad_token_id)

print("question:      ", question.text.strip())
print("right answer:  ", question.answer)
print("full KV:       ", tokenizer.decode(full[0, prompt.shape[1] :]))
print("a tenth of it: ", tokenizer.decode(short[0, prompt.shape[1] :]))

# What the memory takes, tier by tier.
state = compiled.prefill(prompt)
compiled.extend(state, torch.tensor([[int(state.logits.argmax())]]))
for tier in ("device", "peak", "host", "disk"):
    print(
        f"{tier:>7}: {state.nbytes[tier]:>9} bytes, {100 * state.nbytes[tier] / state.full_bytes:5.1f} % of the full KV"
    )
