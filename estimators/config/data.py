"""The run file's ``data`` and ``channels``: what a job reads from S3."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator
from sm_train.entrypoints.job_interface.job_config import (
    CaptionSource,
    Crop,
    DataConfig,
    DecodeMode,
    ExtraConfig,
    ExtraKind,
    Hdr,
    IccProfile,
    ReaderName,
)
from sm_train.estimators.config.fields import (
    DirectoryPath,
    FieldName,
    FileSystemId,
    FunctionName,
    JsonField,
    MemberExtension,
    NonNegativeInt,
    PlainText,
    PositiveFloat,
    PositiveInt,
    S3Folder,
    S3FolderOrObject,
    Section,
    SqlText,
)

MAX_SOURCE_NAME = 58
"""SageMaker allows names of 64 characters, and the index of a source is the channel index_NAME."""


class FileSystemInputSection(Section):
    """A directory of Amazon FSx for Lustre or Amazon EFS, which training jobs mount read-only."""

    id: FileSystemId = Field(description="ID of the file system.")
    type: Literal["FSxLustre", "EFS"] = Field(description="Its service.")
    directory: DirectoryPath = Field(
        description="Absolute path of the directory. In FSx for Lustre it starts with the file "
        "system's mount name, as in /abcdbev4/shards."
    )


def _refuse_sharded_file_system(section: DataSection | ChannelSection) -> None:
    if section.file_system is not None and section.sharded:
        raise ValueError(
            "sharded: every instance sees the whole directory of file_system; remove it"
        )


class CaptionField(Section):
    """A field of a sample's JSON file that holds a caption."""

    field: JsonField = Field(
        description="Name of the field. Dots lead into objects, [0] into lists: texts[0].long."
    )
    weight: PositiveFloat = Field(default=1.0, description="Weight of its caption.")


class ExtraSection(Section):
    """A further file of each sample, which a training loop of yours gets as a tensor."""

    member: MemberExtension = Field(description="Its file extension, such as depth.png.")
    kind: ExtraKind = Field(
        default="image",
        description="image: another image, uint8 with 3 channels. mask: one channel, uint8, scaled "
        "to the nearest pixel. map: one channel of a PNG or .npy file, float32, such as depth. "
        "array: an .npy file as it is, float32, such as an embedding. All but array get the "
        "image's crop and flip.",
    )
    shape: tuple[PositiveInt, ...] = Field(
        default=(), max_length=6, description="Shape of an array; required for that kind."
    )

    @model_validator(mode="after")
    def _check_kind(self) -> ExtraSection:
        if (self.kind == "array") != bool(self.shape):
            fix = "is missing" if self.kind == "array" else "is of kind: array; remove it"
            raise ValueError(f"shape: {fix}")
        if self.kind == "array" and not self.member.endswith("npy"):
            raise ValueError("member: an array is an .npy file; write its extension")
        return self


class SourceSection(Section):
    """A source of the training data, mixed with others by weight."""

    channel: str = Field(
        max_length=MAX_SOURCE_NAME,
        description="A name of `channels` whose `uri` is a prefix of shards, or train for "
        "`data.uri`.",
    )
    weight: PositiveFloat = Field(
        default=1.0, description="Its samples, relative to the weights of the other sources."
    )
    where: SqlText | None = Field(
        default=None, description="The samples to read, as in `data.where`, which is the default."
    )


_CaptionWeights = Annotated[
    Annotated[PositiveFloat, Tag("[weight]")] | Annotated[list[CaptionField], Tag("[fields]")],
    Discriminator(lambda value: "[fields]" if isinstance(value, list) else "[weight]"),
]
"""The weight of a text file's caption, or the fields of a JSON file."""


class DataSection(Section):
    """The training set: WebDataset tars, and which files of a sample are read."""

    uri: S3Folder = Field(
        description="S3 prefix of the training shards. It must contain nothing else: with "
        "`sharded`, each object below it is assigned to one instance (FastFile, ShardedByS3Key)."
    )
    sharded: bool | None = Field(
        default=None,
        description="Whether to distribute the objects of `uri` over the instances "
        "(ShardedByS3Key); false gives every instance all of them (FullyReplicated). Default: "
        "true, and false with `entry`, because Accelerate assigns samples to ranks and expects "
        "every instance to see the same data.",
    )
    file_system: FileSystemInputSection | None = Field(
        default=None,
        description="Directory with the shards of `uri`, which training jobs read instead of S3; "
        "requires `cluster.vpc`. The index and the lists of removed samples are read from S3.",
    )
    local: str | None = Field(
        default=None,
        description="Folder of the same shards on this machine, relative to the run file. "
        "Required by `submit --local`.",
    )
    validation: S3Folder | None = Field(
        default=None,
        description="S3 prefix of held-out shards for the validation loss. None computes no "
        "validation loss.",
    )
    local_validation: str | None = Field(
        default=None,
        description="Folder of the held-out shards on this machine, relative to the run file.",
    )
    samples: PositiveInt | None = Field(
        default=None,
        description="Number of samples in the shards, from which plans and `cost` count epochs. "
        "Default: what the index says.",
    )
    latents: Annotated[int, Field(ge=0, le=4096)] | None = Field(
        default=None,
        description="Resolution of the latents in the shards (`sm-train pack --latents`), in "
        "pixels; 0 if they hold none. Stages at this resolution need not encode images and "
        "captions, which `cost` prices otherwise. Default: what the index says.",
    )
    image_key: PlainText = Field(
        default="jpg;jpeg;png;webp",
        description="File extensions of a sample's image, separated by semicolons; the first "
        "that exists is read.",
    )
    caption_key: PlainText = Field(
        default="txt", description="File extension of a sample's caption."
    )
    caption: dict[MemberExtension, _CaptionWeights] = Field(
        default_factory=dict,
        description="Captions of a sample, of which each epoch chooses one by its weight: weights "
        "of text files by extension, and lists of fields of JSON files, as in {txt: 0.5, json: "
        "[{field: alt_text, weight: 0.3}]}. A list of texts shares its weight. Missing and empty "
        "captions do not count. Default: `caption_key` alone.",
    )
    extras: dict[FieldName, ExtraSection] = Field(
        default_factory=dict,
        max_length=10,
        description="Further files of each sample as tensors, by a name of yours, for a training "
        "loop of yours (`entry`): masks, depth, embeddings, another image.",
    )
    flip: bool = Field(
        default=False,
        description="Whether to mirror half of the images horizontally, others in each epoch.",
    )
    sources: list[SourceSection] = Field(
        default_factory=list,
        max_length=10,
        description="Sources that are mixed by weight, as in [{channel: train, weight: 3}, "
        "{channel: art, weight: 1}]; an epoch has as many samples as all of them. Stages may set "
        "others. Default: `uri` alone.",
    )
    index: bool | None = Field(
        default=None,
        description="Whether to read the index that `sm-train pack` and `sm-train index` write "
        "next to the shards. Without it, every start reads the headers of all shards. Default: "
        "true, and false with `entry`.",
    )
    where: SqlText | None = Field(
        default=None,
        description="SQL condition on columns of the index (`sm-train pack --index-column`): only "
        "the samples that fulfil it are read, as in license IN ('CC0', 'CC-BY'). Default: all.",
    )
    expiry: PlainText = Field(
        default="expiry",
        description="Column of the index with the date or the time at which a sample may not be "
        "used any more, in ISO 8601. `check` and the plan name the samples that expire before the "
        "run ends. An index without the default column is not checked.",
    )
    reader: ReaderName = Field(
        default="indexed",
        description="indexed: read every sample once an epoch, and resume with the very next one. "
        "webdataset: stream random shards with the webdataset package, each GPU by a seed of its "
        "own; it starts without an index and does not resume exactly.",
    )
    epoch_samples: PositiveInt | None = Field(
        default=None,
        description="Samples that count as an epoch of the reader `webdataset`, which draws them "
        "at random. Default: `samples`.",
    )
    shuffle_buffer: PositiveInt = Field(
        default=1000,
        description="Samples that the reader `webdataset` shuffles on each GPU, in memory.",
    )
    pipe: PlainText | None = Field(
        default=None,
        description="Command whose output the reader `webdataset` takes for a shard: {uri} is the "
        "shard's S3 URI, {path} its path in the job. Example: aws s3 cp {uri} -. None opens the "
        "path.",
    )
    transform: FunctionName | None = Field(
        default=None,
        description="Your function as module:function. It gets the files of a sample by extension, "
        "as bytes, with `__key__`, and returns those to use; None skips the sample.",
    )
    crop: Crop = Field(
        default="center",
        description="Which part to keep of an image whose aspect ratio differs from the batch's.",
    )
    decode: DecodeMode = Field(
        default="fast",
        description="exact: decode every image at its full size; pixels within 2 levels of "
        "Pillow's. fast: decode JPEGs of more than twice the training size at a half, a quarter "
        "or an eighth of their size.",
    )
    icc_profile: IccProfile = Field(
        default="srgb",
        description="srgb: convert images with a color profile (Display P3, Adobe RGB, CMYK) to "
        "sRGB, as browsers show them. ignore: use the pixels as stored.",
    )
    hdr: Hdr = Field(
        default="reject",
        description="reject: count HDR images (PQ and HLG) as unreadable samples. keep: use their "
        "pixels as stored.",
    )
    aspect_buckets: bool = Field(
        default=False,
        description="Whether to batch portrait, landscape and square images separately, each at "
        "about the area of resolution².",
    )
    synthetic_samples: NonNegativeInt = Field(
        default=0,
        description="Number of JPEG images that each instance generates instead of reading `uri`, "
        "to measure a speed without data (`sm-train measure --synthetic`); 0 reads the shards.",
    )
    max_bad_fraction: float = Field(
        default=0.01,
        ge=0.0,
        le=1.0,
        description="Fraction of unreadable samples above which the job fails.",
    )

    def job_config(self) -> DataConfig:
        return self._job_struct(
            DataConfig,
            caption=tuple(self.caption_sources()),
            sources=(),
            extras=tuple(
                ExtraConfig(name, extra.member, extra.kind, extra.shape)
                for name, extra in self.extras.items()
            ),
            epoch_samples=self.epoch_samples or self.samples,
            pipe=self.pipe_of(self.uri),
        )

    def pipe_of(self, uri: str) -> str | None:
        """Return the command that prints a shard below ``uri``; {name} is left in it."""
        return self.pipe and self.pipe.replace("{uri}", f"{uri.rstrip('/')}/{{name}}")

    def caption_sources(self) -> Iterator[CaptionSource]:
        """Yield the sources of `caption`."""
        for member, value in self.caption.items():
            if isinstance(value, list):
                for source in value:
                    yield CaptionSource(member, source.field, source.weight)
            else:
                yield CaptionSource(member, None, value)

    @field_validator("caption")
    @classmethod
    def _check_caption(
        cls, caption: dict[str, float | list[CaptionField]]
    ) -> dict[str, float | list[CaptionField]]:
        for member, value in caption.items():
            if isinstance(value, list) != (member.split(".")[-1] == "json"):
                wanted = "a weight" if isinstance(value, list) else "[{field: NAME, weight: 1}]"
                raise ValueError(f"{member}: must be {wanted}")
            if value == []:
                raise ValueError(f"{member}: lists no field; write [{{field: NAME, weight: 1}}]")
        return caption

    @field_validator("transform")
    @classmethod
    def _check_transform(cls, transform: str | None) -> str | None:
        if transform is not None and ":" not in transform:
            raise ValueError("must be a module:function of your code, such as samples:prepare")
        return transform

    @model_validator(mode="after")
    def _check_reader(self) -> DataSection:
        if self.reader == "indexed":
            for name in ("epoch_samples", "shuffle_buffer", "pipe"):
                # A copy of a run file has all keys set.
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"{name}: is used by reader: webdataset; set it, or remove it")
            return self
        if self.epoch_samples is None and self.samples is None:
            raise ValueError("epoch_samples: is missing; reader: webdataset counts by it")
        if self.aspect_buckets:
            raise ValueError("aspect_buckets: needs reader: indexed; set it to false")
        if self.index:
            raise ValueError("index: is not read by reader: webdataset; remove it")
        return self

    @model_validator(mode="after")
    def _check_file_system(self) -> DataSection:
        _refuse_sharded_file_system(self)
        return self

    @model_validator(mode="after")
    def _check_uri_is_prefix(self) -> DataSection:
        uri = self.uri.rstrip("/")
        last = uri.rsplit("/", 1)[-1]
        if re.search(r"\.(tar|tar\.gz|tgz|zip|parquet|csv|jsonl?)$", last):
            raise ValueError(
                f"uri: {uri} is a single object; write the prefix above it: "
                f"{uri.removesuffix(last)}"
            )
        return self


class ChannelSection(Section):
    """An additional input of the job, for user code."""

    uri: S3FolderOrObject | None = Field(
        default=None,
        description="S3 URI of the input: an object if it ends with a file extension, as in "
        "words.txt; otherwise a folder.",
    )
    file_system: FileSystemInputSection | None = Field(
        default=None,
        description="Directory that training jobs mount instead; requires `cluster.vpc`. A source "
        "of the training data needs `uri`, too: the S3 prefix of its index.",
    )
    mode: Literal["File", "FastFile"] = Field(
        default="FastFile",
        description="File downloads the input before the job starts; FastFile streams it on read.",
    )
    sharded: bool = Field(
        default=False,
        description="Whether to distribute the objects over the instances (ShardedByS3Key). "
        "Otherwise every instance gets all of them.",
    )
    local: str | None = Field(
        default=None,
        description="Folder of the same files on this machine, for `submit --local`.",
    )

    @model_validator(mode="after")
    def _check_place(self) -> ChannelSection:
        if self.uri is None and self.file_system is None:
            raise ValueError("uri: is missing; write an S3 URI, or file_system")
        _refuse_sharded_file_system(self)
        return self
