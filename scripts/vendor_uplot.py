"""Fetches uPlot, the chart library of `spanwire report`, from npm into the package: `vendor_uplot.py [VERSION SHA256]`.

Without arguments: the version and hash of assets/uplot.json, so that anybody can check what is in the repository. With
them: another version, and that file is written anew. SHA256 is of the archive that npm serves; a wrong one changes nothing.
"""

import hashlib
import io
import json
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile

ASSETS = pathlib.Path(__file__).parent.parent / "src" / "spanwire" / "report" / "assets"
PIN = ASSETS / "uplot.json"
#: In the archive, and here.
FILES = {
    "package/dist/uPlot.iife.min.js": "uPlot.iife.min.js",
    "package/dist/uPlot.min.css": "uPlot.min.css",
    "package/LICENSE": "uPlot.LICENSE",
}


def main(version: str, sha256: str) -> None:
    npm = shutil.which("npm")
    if npm is None:
        sys.exit("npm is not on PATH; it is what fetches the archive, from whatever registry it is set up for")
    with tempfile.TemporaryDirectory() as folder:
        name = f"uplot@{version}"
        subprocess.run([npm, "pack", "--silent", "--pack-destination", folder, name], check=True, stdout=sys.stderr)
        (archive_file,) = pathlib.Path(folder).iterdir()
        content = archive_file.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        sys.exit(f"{name} has the hash {found}, and {sha256} was asked for: nothing is changed")
    files = {}
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for member, kept_as in FILES.items():
            data = archive.extractfile(member)
            assert data is not None
            text = data.read()
            (ASSETS / kept_as).write_bytes(text)
            files[kept_as] = hashlib.sha256(text).hexdigest()
    pin = {"version": version, "sha256": sha256, "files": files}
    PIN.write_text(json.dumps(pin, indent=2) + "\n", encoding="utf-8")
    print(f"uPlot {version} is in {ASSETS}")


if __name__ == "__main__":
    if len(sys.argv) == 1:
        pinned = json.loads(PIN.read_text(encoding="utf-8"))
        main(pinned["version"], pinned["sha256"])
    elif len(sys.argv) == 3:
        main(sys.argv[1], sys.argv[2].lower().removeprefix("sha256:"))
    else:
        sys.exit(__doc__)
