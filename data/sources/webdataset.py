"""WebDataset tars of the user: of each sample, the text or picture in the member with the extension `source.field`."""

import os
import re
from collections.abc import Iterator
from itertools import chain

from data.sources.file_type import HEAD, check_head
from data.sources.files import FREE, File, is_compressed, is_tar, iterate_members, read_whole
from data.sources.images import PICTURES, ImageSource
from data.sources.source import Input, Piece
from data.sources.text import extract_json_text

_PARTS = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]*)")  # key and extension: the name ends at its first dot
_FIELD = re.compile(r"\.?(json(?:\.(?:gz|xz|bz2|zst)(?=\.|$))?)\.(.+)", re.IGNORECASE)  # of a .json, perhaps compressed
_TEXTS = [f"{kind}{suffix}" for kind in ("txt", "json") for suffix in ("", ".gz", ".xz", ".bz2", ".zst")]
_CLOSELY = 1000  # maximum odd members of a part to guess the encoding of, which takes milliseconds
_DEFAULT = "text"  # of `source.field`


class WebDatasetSource(ImageSource):
    """A source of WebDataset samples: consecutive members whose names are equal up to the first dot.

    `source.field` is the extension of the member to read. `txt` and others hold text, also compressed (`txt.gz`);
    `png`, `jpg` and `jpeg` hold pictures; `json.caption` is the field `caption` of a `.json`. At its default, the first
    sample decides: a `.txt`, a `.json` with a field `text`, or a picture. A tar's name states its split; else a hash of
    the document decides.
    """

    suffixes, noun, missing = (), "tars", "no tar"
    needs, is_text = "", True  # until a sample is a picture
    looked_at = HEAD
    _chosen: tuple[str, str] | None = None
    _odd = 0

    def is_chosen(self, file: File) -> bool:
        """Return if the file is a tar."""
        return is_tar(file.path)

    def _list_tar_documents(self, file: File) -> list[tuple[str, str | None]]:
        """Return nothing: names of samples state no splits."""
        return []

    def read(self, item: Input) -> Iterator[Piece]:
        """Yield the chosen member of each sample of a tar."""
        self._chosen = self._chosen or self._choose_member()
        for key, sample in self._read_samples(item.path):
            name = f"{item.name}/{key}"
            if data := self._read_document(sample, name, f"{item.path}: sample {key}"):
                yield Piece(name, self.split_of(name, item.splits, data), data)
            else:
                self.remarks["samples without text were left out"] += 1

    def _read_samples(self, path: str) -> Iterator[tuple[str, dict[str, bytes]]]:
        """Yield keys of samples, and their members by extension. Members that are not read are empty."""
        before, sample = "", dict[str, bytes]()
        left = FREE + self.options.expansion * os.path.getsize(path)  # bytes that its compressed members may hold
        for name, content, size in iterate_members(path, self.options.expansion, self.remarks):
            parts = _PARTS.fullmatch(name)
            if parts is None:
                self.remarks["members of tars without a key and an extension were left out"] += 1
                continue
            key, extension = parts[1], parts[2].lower()
            if key != before and sample:
                yield before, sample
                sample = {}
            if extension in sample:
                raise ValueError(f"{path}: two members have the name {name}")
            read = self._chosen is not None and extension == self._chosen[0]
            before, sample[extension] = key, read_whole(content, size, f"{path}: {name}", max(1, left)) if read else b""
            left -= len(sample[extension]) if is_compressed(name) else 0
        if sample:
            yield before, sample

    def _read_document(self, sample: dict[str, bytes], name: str, where: str) -> bytes:
        extension, field = self._chosen or self._choose_member()
        if extension not in sample:
            there = ", ".join(f".{each}" for each in sample)
            raise ValueError(f"{where} has no .{extension} (it has {there}). Set source.field= to the one to read")
        for other in sample:
            self.remarks[f"members .{other} of samples were left out"] += other != extension
        if _is_picture(extension):
            self.needs, self.is_text = super().needs, False
            (height, width), raster = self._decode_picture(sample[extension], where)
            self.check_consistent_format(name, height=height, width=width, channels=3)
            return raster
        self.gives = "text"
        content = sample[extension]
        odd = check_head(content[:HEAD], f"{where}: its .{extension}", "", self._odd < _CLOSELY)
        if odd:
            self._odd += 1
            self.remarks[f"members .{extension} are {odd}; the bytes are read as they are"] += 1
        if field:
            option = f"source.field={extension}.FIELD"
            content = extract_json_text(content, field, f"{where}: its .{extension}", self.remarks, option)
        return self.convert_newlines(content)

    def _choose_member(self) -> tuple[str, str]:
        """Return the extension to read, and the field of a .json. Every worker chooses the same."""
        member = self.options.field
        if member != _DEFAULT:
            if parts := _FIELD.fullmatch(member):
                return parts[1].lower(), parts[2]
            return member.lower().lstrip("."), ""
        look = WebDatasetSource(self.options)  # a separate source, so that remarks are not counted twice
        tars = (file for file in self.files if is_tar(file.path))
        _, sample = next(chain.from_iterable(look._read_samples(file.path) for file in tars), ("", {}))
        choices = [(each, "" if each.startswith("txt") else _DEFAULT) for each in _TEXTS if each in sample]
        choices += [(each, "") for each in sample if _is_picture(each)]
        return choices[0] if choices else ("txt", "")


def _is_picture(extension: str) -> bool:
    return f".{extension.rpartition('.')[2]}" in PICTURES
