#!/usr/bin/env bash
# GNU tar 1.34 with --dereference, and webdataset 1.0.2, which reads what it writes.
#
# Expected: `tar -h` stores a copy of the photo for each symbolic link, as `cp -L` does, so a data
# set that is a folder of links becomes shards of photos.
# Seen: of several links to one photo the first is stored as a file, and each other as a HARD LINK
# to it, without content. webdataset skips entries that are no regular files, without a word: those
# samples have a caption and no image. With --hard-dereference as well, both have their image.
# So: a selection of photos that is made of links, in which one photo is shown twice (two captions,
# two crops), loses images on its way into shards; `tar -tv` shows them as `h`.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --quiet --quiet --disable-pip-version-check \
    "webdataset==1.0.2" "numpy==2.4.6" "pyyaml==6.0.3" "braceexpand==0.1.7" \
    2>"$folder/pip.log" || { cat "$folder/pip.log"; exit 1; }
mkdir "$folder/store" "$folder/photos"
printf 'the bytes of a photo' >"$folder/store/photo.jpg"
for name in 000 001; do
    ln -s "$folder/store/photo.jpg" "$folder/photos/$name.jpg"
    printf 'a caption' >"$folder/photos/$name.txt"
done
cd "$folder"
tar --sort=name -h -cf links.tar photos
tar --sort=name -h --hard-dereference -cf copies.tar photos
"$folder/venv/bin/python" - >"$folder/seen" <<'PYTHON'
import tarfile

import webdataset

for name in ("links.tar", "copies.tar"):
    with tarfile.open(name) as tar:
        kinds = [member.type.decode() for member in tar if member.name.endswith(".jpg")]
    samples = [
        sorted(key for key in sample if not key.startswith("__"))
        for sample in webdataset.WebDataset(name, shardshuffle=False)
    ]
    print(name, kinds, samples)
PYTHON
diff - "$folder/seen" <<'SEEN'
links.tar ['0', '1'] [['jpg', 'txt'], ['txt']]
copies.tar ['0', '0'] [['jpg', 'txt'], ['jpg', 'txt']]
SEEN
