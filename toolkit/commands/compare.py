"""``sm-train compare``: two checkpoints side by side, for people to judge without knowing which."""

from __future__ import annotations

from pathlib import Path

import click
from sm_train.toolkit.commands._options import sampling_options


@click.command()
@click.argument("first", type=click.Path(path_type=Path))
@click.argument("second", type=click.Path(path_type=Path))
@sampling_options
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default="compare.html",
    show_default=True,
    help="The page, whole in one file.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output.")
def command(
    first: Path,
    second: Path,
    prompts: Path,
    out: Path,
    steps: int,
    guidance: float,
    seed: int,
    as_json: bool,
) -> None:
    """Draw every prompt from both, with the same noise, into a page that counts who wins.

    FIRST and SECOND are what `sm-train sample` takes. The page shows which image is whose only
    after the last judgement; it needs no network.
    """
    from sm_train.entrypoints.common.atomic_write import write_atomic
    from sm_train.toolkit.sampling.comparison_page import comparison_page
    from sm_train.toolkit.sampling.prompts import read_prompts
    from sm_train.toolkit.sampling.sample import draw_images, find_source, require_file_place
    from sm_train.toolkit.terminal.console import stderr_console, write_json

    lines = read_prompts(prompts)
    require_file_place(out, "page")
    sources = [find_source(one) for one in (first, second)]
    drawn = [
        draw_images(source, lines, steps=steps, guidance=guidance, seed=seed) for source in sources
    ]
    names = (str(first), str(second))
    write_atomic(out, comparison_page(names, lines, (drawn[0], drawn[1]), seed).encode())
    stderr_console().print(f"wrote {len(lines)} pairs to {out}; open it in a browser")
    if as_json:
        write_json({"out": str(out), "pairs": len(lines), "seed": seed})
