"""``ragcache quality``: the effect of chunk reuse, document order, substitution and compression on answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from ragcache_core.cli.command import Command, print_json
from ragcache_core.cli.options import FiniteRange, check_vllm_args, startup_timeout_option, together, vllm_args_argument
from ragcache_core.cli.settings_options import Listed
from ragcache_core.config import CompressionName, check_compression
from ragcache_core.errors import ConfigError
from ragcache_core.ordering import DOCUMENT_ORDERS, DocumentOrder
from ragcache_core.runtime.terminal import Bar
from ragcache_core.types import QuestionFormat, SelectionName

if TYPE_CHECKING:
    from ragcache_core.quality import Question
    from ragcache_core.quality.methods import Method
    from ragcache_core.quality.run import QualityRun
    from ragcache_core.quality.summary import QualitySummary

DEFAULT_SELECTION: SelectionName = "whole_chunks"
DEFAULT_DISK_BYTES = "16GiB"
DEFAULT_ALPHAS: dict[SelectionName, tuple[float, ...]] = {
    "cache_craft": (0.3, 0.6, 1.0, 2.0),
    "whole_chunks": (1.3, 1.5, 1.7, 2.0, 3.0),
}
"""From little recompute to nearly full recompute of moved chunks."""


model_options = together(
    click.option(
        "--questions",
        "questions_path",
        type=click.Path(path_type=Path),
        required=True,
        metavar="FILE",
        help="Questions: JSON lines with question, answer, documents and, optionally, kind; or the "
        "file of a published data set.",
    ),
    click.option(
        "--format",
        "question_format",
        type=click.Choice(get_args(QuestionFormat)),
        default="auto",
        show_default=True,
        help="Format of the questions; auto detects it from the first record.",
    ),
    click.option(
        "--corpus",
        type=click.Path(path_type=Path, exists=True, file_okay=False),
        metavar="DIR",
        help="Folder with the documents that the questions name. [default: the questions contain the texts]",
    ),
    click.option(
        "--limit",
        type=click.IntRange(1),
        metavar="N",
        help="Maximum number of questions, the same number of each kind. [default: all]",
    ),
    click.option(
        "--selection",
        type=click.Choice(get_args(SelectionName)),
        default=DEFAULT_SELECTION,
        show_default=True,
        help="Method that selects which tokens of reused documents are recomputed.",
    ),
    click.option(
        "--alphas",
        type=Listed(number=float, least=0.0),
        metavar="A,A,...",
        help="Values of alpha to compare; a larger alpha recomputes more. [default: several, by the selection]",
    ),
    click.option(
        "--max-recompute",
        type=FiniteRange(0, 1),
        default=1.0,
        show_default=True,
        metavar="SHARE",
        help="Maximum share of a reused document that is recomputed, 0 to 1.",
    ),
    click.option(
        "--max-tokens",
        type=click.IntRange(1),
        default=64,
        show_default=True,
        help="Maximum length of an answer in tokens.",
    ),
    click.option(
        "--kv-cache-bytes",
        metavar="SIZE",
        help="Size of the engines' GPU KV cache, such as 512MiB. [default: vLLM's choice]",
    ),
    click.option("--block-size", type=int, metavar="TOKENS", help="Tokens in a KV block. [default: vLLM's choice]"),
    click.option(
        "--host-bytes",
        metavar="SIZE",
        help="Size of host memory, half of it for chunks, such as 4GiB. [default: as for 'ragcache serve']",
    ),
    startup_timeout_option,
)
"""The options of questions and engines."""


@click.command(
    cls=Command,
    short_help="Measure how chunk reuse or document order changes answers.",
    examples=[
        "ragcache quality examples/demo_model --questions questions.jsonl",
        "ragcache quality org/model --questions questions.jsonl --limit 200 --alphas 1.5,2 -- --max-model-len 16384",
        "ragcache quality org/model --questions questions.jsonl --corpus docs/ --selection cache_craft --json",
        "ragcache quality org/model --questions hotpot_dev_distractor_v1.json --limit 200",
        "ragcache quality org/model --questions questions.jsonl --deduplicate",
        "ragcache quality org/model --questions questions.jsonl --document-order cache_aware",
        "ragcache quality org/model --questions scored.jsonl --documents 4 --max-score-loss 0.02",
        "ragcache quality org/model --questions questions.jsonl --compression int8",
    ],
)
@click.argument("model")
@click.option(
    "--document-order",
    "document_orders",
    type=click.Choice([order for order in DOCUMENT_ORDERS if order != "retrieval"]),
    multiple=True,
    help="Measure this document order instead of chunk reuse; may be repeated.",
)
@click.option(
    "--max-score-loss",
    type=FiniteRange(0, max=1, max_open=True),
    metavar="SHARE",
    help="Measure score-tolerant substitution with this loss, 0 to 1, instead of chunk reuse. The "
    "questions need document scores and spare documents.",
)
@click.option(
    "--compression",
    "compressions",
    type=click.Choice([name for name in get_args(CompressionName) if name not in ("auto", "off")]),
    multiple=True,
    help="Measure answers from KV on disk with this compression instead of chunk reuse; may be repeated.",
)
@click.option(
    "--disk-bytes",
    metavar="SIZE",
    help="Size of the temporary disk tier for --compression. [default: 16GiB]",
)
@click.option(
    "--documents",
    "num_shown",
    type=click.IntRange(1),
    metavar="K",
    help="Documents per prompt, the best first; the others may replace them. [default: all]",
)
@model_options
@click.option(
    "--deduplicate",
    is_flag=True,
    help="Ask the questions as turns of conversations, and compare references to earlier documents "
    "with repeated documents.",
)
@vllm_args_argument
def quality(
    model: str,
    document_orders: tuple[DocumentOrder, ...],
    max_score_loss: float | None,
    compressions: tuple[CompressionName, ...],
    disk_bytes: str | None,
    num_shown: int | None,
    as_json: bool,
    deduplicate: bool,
    **options: Any,
) -> None:
    """Answer questions with several methods, and compare correct answers and computed tokens.

    MODEL is a folder in Hugging Face format, or a name of the hub. One engine after the other is launched for it: full
    recompute; prefix caching; naive reuse of documents computed alone; and chunk reuse with increasing recompute. The
    questions are asked one by one, in the file's order, so keep the order of your traffic: the same documents in
    varying combinations. With --document-order, --max-score-loss or --compression these are audited instead, against
    prefix caching with unchanged prompts; with --alphas, chunk reuse as well. For a compression one engine stores the
    documents' KV in a temporary directory, and a second one answers from there.

    With --deduplicate questions that share documents are turns of one conversation, up to four, and later turns are
    compared: the documents shown again, or referred to where the conversation holds them (deduplicate=True of
    ChatRAGCache and RAGCacheLLM).

    The last column is the share of answers that equal those of the first method, with a 95 % interval.
    """
    from ragcache_core.quality import (
        FULL,
        NAIVE,
        PREFIX,
        REFERRED_TO,
        SHOWN_AGAIN,
        chunk_methods,
        compression_methods,
        conversations_of,
        order_methods,
        summary_table,
    )  # fmt: skip

    methods = [*order_methods(document_orders, max_score_loss), *compression_methods(compressions)]
    if deduplicate and methods:
        raise click.UsageError(
            "--deduplicate is measured alone: leave --document-order, --max-score-loss and --compression out."
        )
    if deduplicate and options["alphas"] is not None:
        raise click.UsageError(
            "--deduplicate cannot be combined with --alphas, which is for chunk reuse: leave --alphas out."
        )
    if compressions:
        options["disk_bytes"] = disk_bytes or DEFAULT_DISK_BYTES
    elif disk_bytes is not None:
        raise click.UsageError(
            "--disk-bytes is for --compression, which is not given: add it, or leave --disk-bytes out."
        )
    for name in compressions:
        check_compression(name)
    run, alphas = quality_run(model, options, num_shown=num_shown, max_score_loss=max_score_loss)
    is_reuse_audited = not methods or options["alphas"] is not None
    methods = [PREFIX, *methods] if methods else [FULL, PREFIX]
    if is_reuse_audited:
        methods += [NAIVE, *chunk_methods(options["selection"], alphas, options["max_recompute"])]
    if deduplicate:
        conversations_of(run.questions)  # refuses questions that share nothing, before an engine starts
        methods = [SHOWN_AGAIN, REFERRED_TO]
    by_method: dict[str, Sequence[QualitySummary]] = {}
    for method, summaries in measured(run, methods):
        by_method[method.name] = summaries
    if as_json:
        rows = [summary.to_dict() for summaries in by_method.values() for summary in summaries]
        print_json({"model": model, "questions": str(options["questions_path"]), "summaries": rows})
        return
    click.echo(summary_table(by_method, SHOWN_AGAIN.name if deduplicate else PREFIX.name))


def quality_run(
    model: str, options: dict[str, Any], *, num_shown: int | None = None, max_score_loss: float | None = None
) -> tuple[QualityRun, tuple[float, ...]]:
    """Return the run and alphas of the options of :data:`model_options`.

    Raises:
        ConfigError: no such questions, or a size that cannot work; no question has documents with scores beyond
            ``num_shown``, to be exchanged with a ``max_score_loss``.
    """
    from ragcache_core.client.launch.arguments import check_model
    from ragcache_core.config import CacheConfig
    from ragcache_core.quality import read_questions
    from ragcache_core.quality.run import QualityRun

    vllm_args = options["vllm_args"]
    check_vllm_args(vllm_args)
    questions = read_questions(
        options["questions_path"],
        options["corpus"],
        limit=options["limit"],
        question_format=options["question_format"],
    )
    if max_score_loss is not None:
        _check_candidates(questions, num_shown, options["questions_path"])
    check_model(model)
    sizes = {
        name: options[name]
        for name in ("kv_cache_bytes", "block_size", "host_bytes", "disk_bytes")
        if options.get(name) is not None
    }
    launch_options = {
        "startup_timeout_s": options["startup_timeout"],
        "max_restarts": 0,  # its successor would have an empty cache
        "extra_args": vllm_args,
    }
    run = QualityRun(model, questions, CacheConfig(**sizes), options["max_tokens"], launch_options, num_shown)
    return run, options["alphas"] or DEFAULT_ALPHAS[options["selection"]]


def _check_candidates(questions: Sequence[Question], num_shown: int | None, path: Path) -> None:
    if any(not question.scores for question in questions):
        raise ConfigError(
            f'the questions {path} have no scores, which --max-score-loss bounds: give each line "scores", a number '
            "for each of its documents, the best first"
        )
    if num_shown is None or all(len(question.documents) <= num_shown for question in questions):
        raise ConfigError(
            f"no question in {path} has more documents than are shown, so none can be "
            "substituted: set --documents below the number of documents per question"
        )


def measured(run: QualityRun, methods: Sequence[Method]) -> Iterator[tuple[Method, list[QualitySummary]]]:
    """Yield each method's result compared with the first, with a progress bar on a terminal."""
    from ragcache_core.quality import summarise

    reference = None
    with Bar("", len(methods) * len(run.questions), "answers") as bar:

        def begin(method: Method) -> Callable[[int], object]:
            bar.show(method.name)
            return bar.advance

        for method, answers in run.answers(methods, begin=begin):
            yield method, summarise(method.name, answers, reference)
            reference = reference or answers
