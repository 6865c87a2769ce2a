"""Fetches uv as uv.lock names it, checked against the lock's hash: `fetch_uv.py uv.lock TARGET`.

The last resort of bootstrap.sh, for a Python that has neither venv nor pip; hence the standard library alone.
"""

import hashlib
import io
import pathlib
import platform
import sys
import tomllib
import urllib.request
import zipfile


def fits(url: str) -> bool:
    """Whether this wheel's platform tag is ours."""
    system = {"Linux": "linux", "Darwin": "macosx"}[platform.system()]
    name = url.rpartition("/")[2]
    return system in name and name.endswith(f"_{platform.machine()}.whl")


def main(lock: pathlib.Path, target: pathlib.Path) -> None:
    packages = tomllib.loads(lock.read_text())["package"]
    wheels = [wheel for package in packages if package["name"] == "uv" for wheel in package["wheels"]]
    # musllinux first: that build is linked statically and so runs on any Linux.
    wheel = min((wheel for wheel in wheels if fits(wheel["url"])), key=lambda wheel: "musllinux" not in wheel["url"])
    with urllib.request.urlopen(wheel["url"], timeout=60) as answer:
        content = answer.read()
    if f"sha256:{hashlib.sha256(content).hexdigest()}" != wheel["hash"]:
        sys.exit(f"{wheel['url']} is not what uv.lock promises")
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".data/scripts/uv"))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(archive.read(member))
    target.chmod(0o755)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
