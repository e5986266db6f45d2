"""The `semkv` command. Heavy imports happen inside commands, so that `--help` is instant."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from semkv.cli.app import app
from semkv.cli.common import budgets as parse_budgets
from semkv.cli.common import check_writable, modes, parse_size, plain_errors, refuse, whole_numbers, words

MODEL_HELP = "`bundled`, a local folder, a GGUF file or a folder with one, or a Hugging Face name."
PROFILE_HELP = "Folder that `semkv-profile` wrote. Default: the bundled model's own; none for others."
FAMILIES = ("single", "multi", "confusable", "dense")
GENERATED_HELP = "Tokens that follow a prompt: budgeted, or kept beside the budget as in papers that evict once; budgeted,kept is both."
METHODS_HELP = "Methods, separated by commas; `auto` is the one that the profile measured to be best at the budget."
LATENTS_HELP = "Multi-head latent attention (DeepSeek): memory of latents, CompileConfig(latents=True)."
KV_DTYPE_HELP = "dtype of exact keys and values: float32, float16, bfloat16. Default: the model's."


@app.command(
    "eval",
    epilog="""
    [bold]Examples[/bold]

    Two methods on the bundled model, and what its profile takes for the best, a minute:

    $ semkv eval --methods full,sekv,auto --budgets 0.1 --lengths 1024 --samples 20

    The whole grid with results and pictures; the same command goes on after an interruption:

    $ semkv eval --budgets 0.05,0.1,0.2 --lengths 1K,4K,8K --samples 100 --json out.json --plot pictures

    Another model with its profile, a budget of 512 tokens per KV head, the question part of the prompt:

    $ semkv eval --model Qwen/Qwen3-0.6B --profile qwen.profile --budgets 512 --lengths 4K --question seen

    Tasks of other benchmarks, with their data (`semkv tasks` lists them):

    $ semkv eval --model Qwen/Qwen3-0.6B --profile qwen.profile --tasks ruler --lengths 8K --source haystack=essays.txt
    --source squad=rajpurkar/squad_v2 --source hotpotqa=hotpot_dev_distractor.json

    $ semkv eval --tasks perplexity --set perplexity.tokens=128 --lengths 2K,4K --samples 10
    """,
)
def eval_command(
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = "bundled",
    profile: Annotated[Path | None, typer.Option(help=PROFILE_HELP)] = None,
    methods: Annotated[str, typer.Option(help=METHODS_HELP)] = "full,streaming_llm,snapkv,sekv",
    budgets: Annotated[
        str,
        typer.Option(help="With a point: fractions of the full KV in (0, 1]. Without: tokens per KV head and layer."),
    ] = "0.05,0.1,0.2",
    generated: Annotated[str, typer.Option(help=GENERATED_HELP)] = "budgeted",
    lengths: Annotated[str, typer.Option(help="Context lengths in tokens; 4K is 4096.")] = "1024,4096,8192",
    question: Annotated[
        str, typer.Option(help="unseen: asked after compression. seen: part of the prefill. both.")
    ] = "unseen",
    families: Annotated[
        str | None,
        typer.Option(
            help="Families of generated questions. Default: single,multi,confusable,dense, or none with --tasks."
        ),
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(help="Tasks or groups of them, `ruler,niah,gsm8k`; `semkv tasks` lists them.")
    ] = None,
    source: Annotated[
        list[str] | None,
        typer.Option(help="KEY=PLACE, data of a task: a file, a folder, or a data set on the Hub. May be repeated."),
    ] = None,
    set_option: Annotated[
        list[str] | None, typer.Option("--set", help="TASK.OPTION=VALUE, `niah.depths=20`. May be repeated.")
    ] = None,
    agreement: Annotated[
        bool,
        typer.Option(
            "--agreement",
            help="Also compare each token of the full cache's answers: answers kept, the same token, KL divergence.",
        ),
    ] = False,
    attention_mass: Annotated[
        bool,
        typer.Option(
            "--attention-mass",
            help="Also measure how much of the attention to far tokens each method's choice catches, by layer and head.",
        ),
    ] = False,
    chat: Annotated[
        bool, typer.Option("--chat", help="Write the tasks' prompts by the tokenizer's chat template.")
    ] = False,
    samples: Annotated[
        int, typer.Option(help="Questions per family or task and length; at most those there are.")
    ] = 50,
    questions_per_context: Annotated[int, typer.Option(help="Questions that share a context and its prefill.")] = 4,
    seed: Annotated[int, typer.Option(help="Which contexts are drawn.")] = 0,
    json: Annotated[
        Path | None, typer.Option(help="Write the report here; rows go beside it, and a later run goes on from them.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Folder for pictures (PNG).")] = None,
    kv_dtype: Annotated[str | None, typer.Option(help=KV_DTYPE_HELP)] = None,
    latents: Annotated[bool, typer.Option("--latents", help=LATENTS_HELP)] = False,
    device: Annotated[str | None, typer.Option(help="Where to run, `cuda` for example.")] = None,
    workers: Annotated[
        int,
        typer.Option(
            help="Processes that measure contexts side by side: quicker for small models, and step times are worse."
        ),
    ] = 1,
) -> None:
    """Measure answers, memory, transfers and step times of methods: on generated questions, and on known benchmarks.

    One prefill of a context serves all methods, budgets and questions. Intervals are of 95 %, clustered by context.
    """
    with plain_errors():
        parsed_lengths = whole_numbers(lengths, "--lengths")
        method_names = words(methods, "--methods")
        default = [] if tasks is not None else list(FAMILIES)
        family_names = default if families is None else words(families, "--families")
        if samples < 1:
            refuse(f"--samples {samples}: expected at least 1")
        if questions_per_context < 1:
            refuse(f"--questions-per-context {questions_per_context}: expected at least 1")
        if seed < 0:
            refuse(f"--seed {seed}: expected a number from 0 on")
        if workers < 1:
            refuse(f"--workers {workers}: expected at least 1")
        check_writable(json, "--json")
        check_writable(plot, "--plot", folder=True)
        from semkv.cli.evaluate import EvalRequest, run_eval
        from semkv.config import CompileConfig

        run_eval(
            EvalRequest(
                model=model,
                profile=profile,
                methods=method_names,
                budgets=parse_budgets(budgets, "--budgets"),
                lengths=parsed_lengths,
                families=family_names,
                question=question,
                samples=samples,
                questions_per_context=questions_per_context,
                seed=seed,
                json=json,
                plot=plot,
                config=CompileConfig.model_validate({"kv_dtype": kv_dtype, "floor": 0, "latents": latents}),
                device=device,
                generated=modes(generated),
                tasks=[] if tasks is None else words(tasks, "--tasks"),
                sources=source or [],
                options=set_option or [],
                chat=chat,
                agreement=agreement,
                mass=attention_mass,
                workers=workers,
            )
        )


@app.command(
    "tasks",
    epilog="""
    [bold]Examples[/bold]

    $ semkv tasks

    $ semkv tasks ruler,gsm8k
    """,
)
def tasks_command(
    names: Annotated[str | None, typer.Argument(help="Tasks or groups, separated by commas. Default: all.")] = None,
) -> None:
    """List the tasks of `semkv eval --tasks`: what they ask, the data they take (`--source`) and options (`--set`)."""
    with plain_errors():
        from semkv.cli.tasks import run_tasks

        run_tasks(None if names is None else words(names, "NAMES"))


@app.command(
    "explain",
    epilog="""
    [bold]Examples[/bold]

    $ semkv explain bundled

    $ semkv explain Qwen/Qwen3-0.6B --method streaming_llm --budget 0.1 --verbose
    """,
)
def explain_command(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    profile: Annotated[Path | None, typer.Option(help=PROFILE_HELP)] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="Default: the one that the profile measured to be best at the budget; full without a profile."
        ),
    ] = None,
    budget: Annotated[str, typer.Option(help="Fraction of the full KV, or tokens per KV head and layer.")] = "0.1",
    verbose: Annotated[bool, typer.Option("--verbose", help="Also what each pass did.")] = False,
) -> None:
    """Show every attention site of a model: what was found, what it becomes, and why."""
    with plain_errors():
        parsed = parse_budgets(budget, "--budget")
        if len(parsed) != 1:
            refuse(f"--budget {budget!r}: expected one budget")
        from semkv.cli.inspect import run_explain

        run_explain(model, profile, method, parsed[0], verbose)


@app.command(
    "export",
    epilog="""
    [bold]Examples[/bold]

    The bundled model's step in ONNX, and the memory of a text to go on from (needs semkv[onnx]):

    $ semkv export bundled bundled.step --method quest --budget 0.25 --text prompt.txt --tokens 64

    A package that runs where only torch is installed:

    $ semkv export Qwen/Qwen3-0.6B qwen.step --method sekv --budget 0.1 --format aoti

    What is in the folder, and a host of a page: docs/export.md, examples/onnx_loop.py.
    """,
)
def export_command(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    out: Annotated[Path, typer.Argument(help="Folder to write; it must not exist, or be empty.")],
    profile: Annotated[Path | None, typer.Option(help=PROFILE_HELP)] = None,
    method: Annotated[str, typer.Option(help="How memory is kept; `full` keeps every token.")] = "full",
    budget: Annotated[
        str | None,
        typer.Option(help="Fraction of the full KV, or tokens per KV head and layer. Default: 0.1; `full` takes none."),
    ] = None,
    format: Annotated[
        str, typer.Option(help="onnx: standard operators, for onnxruntime. aoti: a package for this CPU, for torch.")
    ] = "onnx",
    text: Annotated[
        Path | None, typer.Option(help="A prompt: its memory is written beside the step, as state.safetensors.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens that the memory has room for behind the prompt.")] = 256,
) -> None:
    """Write a model's decode step as a folder that runs without semkv: the step, and step.json, which says what goes in and out."""
    with plain_errors():
        parsed = [None] if budget is None else parse_budgets(budget, "--budget")
        if len(parsed) != 1:
            refuse(f"--budget {budget!r}: expected one budget")
        if tokens < 1:
            refuse(f"--tokens {tokens}: expected at least 1")
        from semkv.cli.export import run_export

        run_export(model, out, profile, method, parsed[0], format, text, tokens)


@app.command(
    "plan",
    epilog="""
    [bold]Examples[/bold]

    $ semkv plan --model meta-llama/Llama-3.1-8B --gpu rtx4090 --context 128K --budget 0.1

    $ semkv plan --model config.json --gpu h100,link=25GB/s --context 64K --batch 16 --budget 2048 --report pictures

    $ semkv plan --model config.json --gpu memory=80GB,bandwidth=3.35TB/s,link=64GB/s --context 1024K --budget full

    A deployment: GPUs, hosts and links for a thousand users at once.

    $ semkv plan --model config.json --method sekv --budget 10% --users 1000 --context 128K --gpu h100 --gpus 64 --host-memory 1T
    """,
)
def plan_command(
    model: Annotated[
        str, typer.Option(help="`bundled`, a config.json, its folder, a GGUF file, or a Hugging Face name.")
    ],
    gpu: Annotated[str, typer.Option(help="A name such as h100, numbers as in the examples, or a name and numbers.")],
    context: Annotated[str, typer.Option(help="Tokens of each row; 128K is 131072.")],
    batch: Annotated[int, typer.Option(help="Rows at once.")] = 1,
    budget: Annotated[
        str, typer.Option(help="A fraction of the full KV, tokens per KV head and layer, or `full`: without semkv.")
    ] = "0.1",
    waits: Annotated[
        str, typer.Option(help="How folded tokens wait on the host: int8, raw, or none where the method drops them.")
    ] = "int8",
    overlap: Annotated[
        float, typer.Option(help="Of what a step unfolds, the share that the step before unfolded too.")
    ] = 0.95,
    latents: Annotated[bool, typer.Option("--latents", help=LATENTS_HELP)] = False,
    dtype: Annotated[str | None, typer.Option(help="Of weights and KV. Default: the configuration's.")] = None,
    weights: Annotated[str | None, typer.Option(help="Size of a quantised checkpoint, `40GB`.")] = None,
    working_memory: Annotated[
        str | None, typer.Option(help="Beside weights and KV, `4GB`. Default: 0.3 of the weights.")
    ] = None,
    host_memory: Annotated[str | None, typer.Option(help="Memory of a host. Default: no limit.")] = None,
    users: Annotated[
        int | None, typer.Option(help="Plan a deployment: so many contexts, all answering at once.")
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="--users: GPUs that there are. Default: as many as needed.")] = None,
    gpus_per_host: Annotated[int, typer.Option(help="--users: of one host.")] = 8,
    network: Annotated[str, typer.Option(help="--users: between hosts, one direction.")] = "12.5GB/s",
    method: Annotated[str | None, typer.Option(help="--users: whose measured steps estimates are made from.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the plan here.")] = None,
    report: Annotated[Path | None, typer.Option(help="Folder for a picture (PNG).")] = None,
) -> None:
    """What fits on a machine, at which length and batch, and the least that a step takes. Needs the configuration only."""
    with plain_errors():
        lengths = whole_numbers(context, "--context")
        budgets = [None] if budget == "full" else parse_budgets(budget, "--budget")
        if len(lengths) != 1 or len(budgets) != 1:
            refuse("a plan takes one --context and one --budget")
        check_writable(json, "--json")
        check_writable(report, "--report", folder=True)
        from semkv.cli.plan import PlanRequest, fleet_of, run_plan
        from semkv.planning.plan import Workload

        fleet = fleet_of(users, gpus, gpus_per_host, host_memory, network, method, batch, budgets[0])

        workload = Workload(
            lengths[0],
            batch,
            budgets[0],
            waits,
            overlap,
            runtime=parse_size(working_memory, "--working-memory"),
            host=parse_size(host_memory, "--host-memory"),
        )
        size = parse_size(weights, "--weights")
        run_plan(PlanRequest(model, gpu, workload, dtype, size, json, report, latents, fleet, method))


@app.command(
    "bench",
    epilog="""
    [bold]Examples[/bold]

    $ semkv bench --methods full,quest --budgets 0.1 --context 2K

    $ semkv bench --model Qwen/Qwen3-0.6B --profile qwen.profile --text book.txt --methods full,sketch --budgets 0.05,0.1
    --context 32K --device cuda --gpu h100

    $ semkv bench --methods quest --host disk --context 8K
    """,
)
def bench_command(
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = "bundled",
    profile: Annotated[Path | None, typer.Option(help=PROFILE_HELP)] = None,
    methods: Annotated[str, typer.Option(help=METHODS_HELP)] = "full,quest,sekv",
    budgets: Annotated[
        str,
        typer.Option(help="With a point: fractions of the full KV in (0, 1]. Without: tokens per KV head and layer."),
    ] = "0.1",
    generated: Annotated[str, typer.Option(help=GENERATED_HELP)] = "budgeted",
    context: Annotated[str, typer.Option(help="Tokens of the prompt; 4K is 4096.")] = "2K",
    batch: Annotated[int, typer.Option(help="Rows at once, of the same prompt.")] = 1,
    steps: Annotated[int, typer.Option(help="Decode steps that are timed, a token each.")] = 64,
    warmup: Annotated[int, typer.Option(help="Decode steps before them.")] = 4,
    text: Annotated[
        Path | None,
        typer.Option(
            help="File that the prompt is the start of. Default: random tokens, on which overlap says little."
        ),
    ] = None,
    kv_dtype: Annotated[str | None, typer.Option(help=KV_DTYPE_HELP)] = None,
    latents: Annotated[bool, typer.Option("--latents", help=LATENTS_HELP)] = False,
    host: Annotated[str, typer.Option(help="Where folded tokens wait: ram, or disk (files in --disk-folder).")] = "ram",
    disk_folder: Annotated[
        str | None, typer.Option(help="Folder of those files. Default: the system's temporary folder.")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="This machine as `semkv plan` takes it, for the floor under a step.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Where to run, `cuda` for example.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write every step's time here.")] = None,
) -> None:
    """Time methods on this machine: first token, percentiles of a step, bytes per tier, transfers, beside the floor.

    Of the folded tokens that a step unfolds, `overlap` were there from the step before. It copies the others itself, and its time
    contains that.
    """
    with plain_errors():
        lengths = whole_numbers(context, "--context")
        if len(lengths) != 1 or batch < 1:
            refuse("a benchmark takes one --context and a --batch of at least 1")
        check_writable(json, "--json")
        settings = {
            "kv_dtype": kv_dtype,
            "floor": 0,
            "latents": latents,
            "host": host,
            "disk_folder": disk_folder,
        }
        from semkv.cli.bench import BenchRequest, run_bench
        from semkv.config import CompileConfig

        run_bench(
            BenchRequest(
                model,
                profile,
                words(methods, "--methods"),
                parse_budgets(budgets, "--budgets"),
                lengths[0],
                batch,
                steps,
                warmup,
                CompileConfig.model_validate(settings),
                generated=modes(generated),
                gpu=gpu,
                text=text,
                device=device,
                json=json,
            )
        )


@app.command(
    "lm-eval",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="""
    [bold]Examples[/bold]

    $ semkv lm-eval --model_args pretrained=Qwen/Qwen3-0.6B,profile=qwen.profile,method=sekv,budget=0.1 --tasks lambada_openai

    Beside full attention, and beside the harness's own model:

    $ semkv lm-eval --model_args pretrained=Qwen/Qwen3-0.6B,method=full --tasks lambada_openai

    $ semkv lm-eval --model hf --model_args pretrained=Qwen/Qwen3-0.6B --tasks lambada_openai

    The harness's own help: `lm_eval run --help`.
    """,
)
def lm_eval_command(
    context: typer.Context,
) -> None:
    r"""Run lm-evaluation-harness (semkv\[lm-eval]) with its own arguments; without --model its model is `semkv`.

    A context is read and compressed before its continuation is read or generated. --model_args: pretrained, method, budget, profile,
    tokenizer, dtype, device, settings of a compilation and options of the method.
    """
    with plain_errors():
        from semkv.cli.lm_eval import run_lm_eval

        run_lm_eval(context.args)


@app.command(
    "serve",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="""
    [bold]Examples[/bold]

    The OpenAI API on port 8000, by vLLM, from a tenth of the KV memory:

    $ semkv serve Qwen/Qwen3-0.6B --method quest --budget 0.1

    A saved model, with 8 GB for all requests; what semkv does not know goes to vLLM:

    $ semkv serve qwen.semkv --tokenizer Qwen/Qwen3-0.6B --memory 8GB --max-num-seqs 16
    """,
)
def serve_command(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help=f"A folder that `compiled.save` wrote, or a model: {MODEL_HELP}")],
    method: Annotated[
        str | None,
        typer.Option(help="Default: a saved model's own; `auto` with a profile and a budget, else `full`."),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(help="Fraction of the full KV, or tokens per KV head and layer. Default: the saved model's."),
    ] = None,
    profile: Annotated[Path | None, typer.Option(help=PROFILE_HELP)] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Model whose tokenizer and chat template are taken; a saved model has none.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Of the model in the API. Default: that of the folder or file.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    memory: Annotated[
        str | None, typer.Option(help="For all requests together, `8GB`. Default: half of what is free.")
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(help="Of the host, for prompts being read and folded tokens, `8GB`. Default: no limit."),
    ] = None,
    keep_sessions: Annotated[str | None, typer.Option(help="For ended requests, which others go on from.")] = None,
    max_model_len: Annotated[
        str | None,
        typer.Option(help="Tokens of a request, prompt and answer; 8K is 8192. Default: the model's context."),
    ] = None,
    tensor_parallel_size: Annotated[
        int, typer.Option(help="Processes that share the model; on GPUs, one each. --memory is of each.")
    ] = 1,
    ray: Annotated[bool, typer.Option("--ray", help="Run it with Ray Serve LLM, in replicas.")] = False,
    replicas: Annotated[int | None, typer.Option(help="--ray: engines behind the address. Default: 1.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command that starts vLLM, and stop.")] = False,
) -> None:
    """Serve a model over the OpenAI API, in vLLM (docs/serving.md). Options that are not named here go to `vllm serve`."""
    with plain_errors():
        budgets = [None] if budget is None else parse_budgets(budget, "--budget")
        lengths = [None] if max_model_len is None else whole_numbers(max_model_len, "--max-model-len")
        if len(budgets) != 1 or len(lengths) != 1:
            refuse("a server takes one --budget and one --max-model-len")
        if not 0 < port < 65536:
            refuse(f"--port {port}: expected a number from 1 to 65535")
        from semkv.cli.serve import ServeRequest, run_serve

        run_serve(
            ServeRequest(
                model,
                method,
                budgets[0],
                profile,
                tokenizer,
                name,
                host,
                port,
                parse_size(memory, "--memory"),
                parse_size(host_memory, "--host-memory"),
                lengths[0],
                dry_run,
                context.args,
                ray,
                parse_size(keep_sessions, "--keep-sessions"),
                replicas,
                tensor_parallel_size,
            )
        )


@app.command(
    "info",
    epilog="""
    [bold]Examples[/bold]

    $ semkv info llama.profile

    $ semkv info llama.semkv
    """,
)
def info_command(
    path: Annotated[Path, typer.Argument(help="Folder of a profile or of a compiled artifact.")],
) -> None:
    """Show what a profile or a compiled artifact holds, for which model, made when and how. Loads no weights."""
    with plain_errors():
        from semkv.cli.inspect import run_info

        run_info(path)


@app.command(
    "demo",
    epilog="""
    [bold]Examples[/bold]

    $ semkv demo

    $ semkv demo --contexts 12 --samples 40 --out demo_output
    """,
)
def demo_command(
    out: Annotated[Path, typer.Option(help="Folder for the profile, results and pictures.")] = Path("demo_output"),
    length: Annotated[str, typer.Option(help="Context length of the evaluation, tokens.")] = "2K",
    budget: Annotated[str, typer.Option(help="Fraction of the full KV, or tokens per KV head and layer.")] = "0.1",
    samples: Annotated[int, typer.Option(help="Questions per task family.")] = 40,
    contexts: Annotated[
        int,
        typer.Option(
            help="Contexts that the codebooks of `sketch` are learned from; 0 takes the profile that is committed with the model."
        ),
    ] = 6,
    seed: Annotated[int, typer.Option(help="Which contexts are drawn.")] = 0,
) -> None:
    """The whole road on the bundled model, in minutes: calibrate, compile to a tenth of the KV, ask, evaluate, draw."""
    with plain_errors():
        parsed, lengths = parse_budgets(budget, "--budget"), whole_numbers(length, "--length")
        if len(parsed) != 1 or len(lengths) != 1:
            refuse("the demo takes one --budget and one --length")
        if samples < 1 or contexts < 0 or seed < 0:
            refuse("--samples must be at least 1, --contexts and --seed at least 0")
        check_writable(out, "--out", folder=True)
        from semkv.cli.demo import run_demo

        run_demo(out, lengths[0], parsed[0], samples, contexts, seed)


if __name__ == "__main__":
    app()
