"""Read a long text once, then ask several questions: one after the other, and side by side on forks of one state."""

import semkv
from semkv.profiles.bundled.tasks import make_haystack

model, tokenizer = semkv.bundled.load()
compiled = semkv.compile(model, semkv.bundled.profile(), method="sekv", budget=0.10)

haystack = make_haystack("dense", 1200, seed=3, n_questions=3)
state = compiled.prefill(tokenizer(haystack.context, return_tensors="pt").input_ids)
read = state.lengths[0]


def ask(state, question):
    """The answer's tokens; the state goes on from the question and the answer."""
    ids = tokenizer(question.text, return_tensors="pt", add_special_tokens=False).input_ids
    new = len(question.answer.split())
    out = compiled.generate(ids, state=state, max_new_tokens=new, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    return tokenizer.decode(out[0, ids.shape[1] :])


# Side by side: each question gets its own copy of the memory; the text is not read again.
for question in haystack.questions:
    fork = state.fork()
    print(f"{question.text.strip()} -> {ask(fork, question)} (right: {question.answer})")
assert state.lengths == [read]

# One after the other: questions and answers become part of the conversation.
for question in haystack.questions:
    print(f"{question.text.strip()} -> {ask(state, question)} (right: {question.answer})")
print(f"the conversation now has {state.lengths[0]} tokens, {state.lengths[0] - read} of them after the text")
