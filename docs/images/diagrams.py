"""Write the diagrams of README and of the concepts page as SVG (`make docs`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from pathlib import Path

FONT = "font-family='system-ui, sans-serif'"
LINE = "#57606a"
FILLS = {
    "plain": "#f6f8fa",
    "laptop": "#ddf4ff",
    "aws": "#fff8c5",
    "job": "#dafbe1",
    "done": "#eac54f",
}


@dataclass
class Drawing:
    """Boxes, arrows and notes on a white background; units are pixels."""

    width: int
    height: int
    label: str
    parts: list[str] = field(default_factory=list)

    def box(self, x: int, y: int, w: int, h: int, text: str, fill: str = "plain") -> None:
        """Draw a box with centered lines; the first is bold."""
        self.parts.append(
            f"<rect x='{x}' y='{y}' width='{w}' height='{h}' rx='6' fill='{FILLS[fill]}' "
            f"stroke='{LINE}'/>"
        )
        lines = text.split("\n")
        top = y + h / 2 - (len(lines) - 1) * 8 + 4
        for number, line in enumerate(lines):
            weight = "600" if number == 0 else "400"
            self.text(x + w // 2, round(top + 16 * number), line, weight=weight)

    def group(self, x: int, y: int, w: int, h: int, title: str) -> None:
        """Draw a dashed frame with a title at its top left."""
        self.parts.append(
            f"<rect x='{x}' y='{y}' width='{w}' height='{h}' rx='8' fill='none' stroke='{LINE}' "
            "stroke-dasharray='5 4'/>"
        )
        self.text(x + 10, y + 18, title, anchor="start", weight="600")

    def arrow(self, x: int, y: int, to_x: int, to_y: int, text: str = "") -> None:
        """Draw an arrow with a label above its middle."""
        self.parts.append(
            f"<line x1='{x}' y1='{y}' x2='{to_x}' y2='{to_y}' stroke='{LINE}' stroke-width='1.5' "
            "marker-end='url(#head)'/>"
        )
        if text:
            self.text((x + to_x) // 2, (y + to_y) // 2 - 6, text, size=11)

    def text(
        self,
        x: int,
        y: int,
        text: str,
        *,
        anchor: str = "middle",
        weight: str = "400",
        size: int = 13,
    ) -> None:
        """Draw one line of text."""
        self.parts.append(
            f"<text x='{x}' y='{y}' text-anchor='{anchor}' font-size='{size}' "
            f"font-weight='{weight}' fill='#1f2328'>{escape(text)}</text>"
        )

    def write(self, name: str) -> None:
        """Write the drawing next to this script."""
        head = (
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {self.width} {self.height}' "
            f"width='{self.width}' role='img' aria-label='{escape(self.label)}' {FONT}>"
            "<defs><marker id='head' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' "
            f"markerHeight='7' orient='auto'><path d='M0 0L8 4L0 8z' fill='{LINE}'/>"
            "</marker></defs>"
            f"<rect width='{self.width}' height='{self.height}' rx='8' fill='#ffffff'/>"
        )
        text = "\n".join([head, *self.parts, "</svg>\n"])
        Path(__file__).with_name(f"{name}.svg").write_text(text, encoding="utf-8")


def architecture() -> Drawing:
    """Laptop, S3, SageMaker and CloudWatch, and what passes between them."""
    drawing = Drawing(860, 330, "A run file on a laptop becomes training jobs on SageMaker")
    drawing.group(15, 15, 230, 300, "Laptop: sm-train")
    drawing.box(35, 50, 190, 44, "run.yaml", "laptop")
    drawing.box(35, 110, 190, 52, "check · cost · submit\nplan, price, confirmation", "laptop")
    drawing.box(35, 180, 190, 52, "watch · status · logs\nrestarts, budget", "laptop")
    drawing.box(35, 250, 190, 50, "review · diagnose", "laptop")
    drawing.arrow(130, 94, 130, 110)
    drawing.group(325, 15, 280, 300, "SageMaker training job")
    drawing.box(345, 50, 240, 48, "launcher on each instance\ntorchrun, or MPI for SMDDP", "job")
    drawing.box(
        345, 125, 240, 66, "ranks: one per GPU\nsampler → decode → step\nDDP or FSDP2", "job"
    )
    drawing.box(345, 218, 240, 48, "watchdog on each node\nheartbeats, stalls, alerts", "job")
    drawing.arrow(465, 98, 465, 125)
    drawing.arrow(465, 218, 465, 191)
    drawing.group(685, 15, 160, 300, "AWS")
    drawing.box(700, 50, 130, 60, "S3\nshards + index", "aws")
    drawing.box(700, 130, 130, 60, "S3\ncheckpoints, model", "aws")
    drawing.box(700, 218, 130, 80, "CloudWatch\nevent lines,\nmetrics, alarms", "aws")
    drawing.arrow(225, 130, 325, 80)
    drawing.text(282, 60, "request +", size=11)
    drawing.text(285, 74, "bundle", size=11)
    drawing.arrow(700, 80, 585, 145, "FastFile")
    drawing.arrow(585, 165, 700, 162)
    drawing.arrow(585, 244, 700, 256, "events")
    drawing.arrow(700, 284, 225, 284, "logs")
    return drawing


def run_stage_job() -> Drawing:
    """One run, its stages, and the jobs of each stage."""
    drawing = Drawing(760, 230, "A run has stages, and each stage is trained by one or more jobs")
    drawing.group(10, 10, 740, 210, "run my-run")
    for number, (stage, jobs) in enumerate((("256px", 2), ("512px", 1), ("1024px", 1))):
        x = 30 + 245 * number
        drawing.group(x, 42, 215, 165, f"stage {stage}")
        for job in range(jobs):
            state = "spot instances lost" if (jobs, job) == (2, 0) else "Completed"
            drawing.box(
                x + 15, 72 + 64 * job, 185, 48, f"my-run--{stage}-000{job + 1}\n{state}", "job"
            )
        if number:
            drawing.arrow(x - 30, 120, x, 120)
            drawing.text(x - 15, 108, "EMA", size=10)
    drawing.arrow(137, 120, 137, 136)
    return drawing


def shards() -> Drawing:
    """How shards, the shard index and the sampler become batches."""
    drawing = Drawing(
        800, 270, "Shards are assigned to nodes, and the sampler assigns samples to ranks"
    )
    drawing.box(15, 30, 150, 48, "photos + captions", "laptop")
    drawing.arrow(165, 54, 235, 54, "pack")
    for number in range(4):
        drawing.box(235, 20 + 46 * number, 140, 38, f"shard-00000{number}.tar", "aws")
    drawing.box(235, 212, 140, 44, "index.parquet\noffsets, digests", "aws")
    drawing.arrow(375, 60, 455, 60)
    drawing.arrow(375, 155, 455, 155)
    drawing.text(415, 48, "ShardedByS3Key", size=10)
    drawing.group(455, 15, 330, 90, "node 0")
    drawing.group(455, 115, 330, 90, "node 1")
    for node in range(2):
        drawing.box(470, 44 + 100 * node, 130, 50, "sampler\nseed, epoch, step", "job")
        drawing.arrow(600, 69 + 100 * node, 640, 69 + 100 * node)
        drawing.box(
            640, 44 + 100 * node, 130, 50, f"ranks {2 * node}, {2 * node + 1}\nbatches", "job"
        )
    drawing.arrow(375, 234, 535, 195)
    return drawing


def checkpoints() -> Drawing:
    """How a checkpoint becomes complete, and from which one a job resumes."""
    drawing = Drawing(
        800, 250, "Ranks write shards of the state, a marker completes the checkpoint"
    )
    drawing.group(10, 10, 330, 225, "job 0001")
    drawing.box(30, 45, 130, 44, "rank 0 … N\nstep 1,000", "job")
    drawing.arrow(160, 67, 200, 67, "copy")
    drawing.box(200, 45, 125, 44, "background\nwriter", "job")
    drawing.box(30, 120, 295, 40, "step-00001000/ shards with digests")
    drawing.box(30, 178, 295, 40, "marker: complete", "done")
    drawing.arrow(262, 89, 262, 120)
    drawing.arrow(178, 160, 178, 178)
    drawing.box(410, 100, 140, 70, "S3\nuploaded file by file,\nin any order", "aws")
    drawing.arrow(340, 135, 410, 135)
    drawing.group(620, 10, 170, 225, "job 0002")
    drawing.box(635, 55, 140, 60, "verify digests,\nskip incomplete")
    drawing.box(635, 150, 140, 60, "resume at 1,000\nsame next batch", "job")
    drawing.arrow(550, 120, 635, 90)
    drawing.arrow(705, 115, 705, 150)
    return drawing


def bundle() -> Drawing:
    """What a job's bundle holds."""
    drawing = Drawing(760, 190, "The bundle holds the run file, sm-train's job code and user code")
    drawing.box(15, 20, 170, 42, "run.yaml", "laptop")
    drawing.box(15, 76, 170, 42, "code: ./my_code", "laptop")
    drawing.box(15, 132, 170, 42, "sm_train.entrypoints", "laptop")
    drawing.group(270, 12, 190, 170, "sourcedir.tar.gz")
    drawing.text(365, 60, "run.json · job.json")
    drawing.text(365, 85, "train.py · requirements.txt")
    drawing.text(365, 110, "sm_train/ · user code")
    drawing.text(365, 145, "SHA-256, git commit", size=11)
    for y in (41, 97, 153):
        drawing.arrow(185, y, 270, 97)
    drawing.arrow(460, 97, 550, 60)
    drawing.arrow(460, 97, 550, 135)
    drawing.box(550, 34, 190, 50, "SageMaker job", "job")
    drawing.box(550, 110, 190, 50, "submit --local\nemulated nodes", "laptop")
    return drawing


def events() -> Drawing:
    """From event lines and heartbeats to the commands that read them."""
    drawing = Drawing(800, 240, "Ranks write event lines; the watchdog reads heartbeats")
    drawing.group(10, 10, 330, 215, "each node")
    drawing.box(30, 50, 120, 60, "rank\nstep, phase", "job")
    drawing.box(200, 50, 125, 60, "heartbeat\nshared memory")
    drawing.arrow(150, 80, 200, 80)
    drawing.box(200, 145, 125, 60, "watchdog\nlearned timeouts", "job")
    drawing.arrow(262, 110, 262, 145)
    drawing.box(410, 75, 150, 80, 'CloudWatch Logs\nSMT {"kind": …}', "aws")
    drawing.arrow(90, 110, 410, 120)
    drawing.text(100, 135, "event lines", size=11)
    drawing.arrow(325, 175, 410, 140)
    drawing.box(620, 20, 165, 40, "watch · status", "laptop")
    drawing.box(620, 75, 165, 40, "review · diagnose", "laptop")
    drawing.box(620, 130, 165, 40, "cost --measured", "laptop")
    drawing.box(620, 185, 165, 40, "alerts, alarms", "aws")
    for y in (40, 95, 150):
        drawing.arrow(560, 115, 620, y)
    drawing.arrow(325, 195, 620, 205, "stall: alert")
    return drawing


def cost() -> Drawing:
    """From throughput to dollars, with a range."""
    drawing = Drawing(800, 210, "Throughput, steps and prices give billable seconds and dollars")
    drawing.box(15, 15, 180, 44, "it/s\nmeasured, or estimated ~", "laptop")
    drawing.box(15, 80, 180, 44, "start-up, checkpoints,\nevaluation", "plain")
    drawing.box(15, 145, 180, 44, "failures × lost time\n+ restart", "plain")
    drawing.box(280, 70, 190, 64, "billable seconds\nP10 · median · P90", "done")
    for y in (37, 102, 167):
        drawing.arrow(195, y, 280, 102)
    drawing.box(540, 15, 120, 44, "× instances")
    drawing.box(540, 80, 120, 44, "× price\nwith source", "aws")
    drawing.box(540, 145, 120, 44, "+ S3, logs")
    drawing.arrow(470, 102, 540, 102)
    drawing.box(700, 70, 85, 64, "dollars\nand range", "done")
    drawing.arrow(660, 102, 700, 102)
    return drawing


def main() -> None:
    architecture().write("architecture")
    run_stage_job().write("concept-run")
    shards().write("concept-shards")
    checkpoints().write("concept-checkpoint")
    bundle().write("concept-bundle")
    events().write("concept-events")
    cost().write("concept-cost")


if __name__ == "__main__":
    main()
