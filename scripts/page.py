"""Builds the gateway's page and checks that the committed build belongs to the committed source.

    python scripts/page.py build    npm ci, type check, build into services/gateway/page/static (needs node and npm)
    python scripts/page.py check    compares hashes of source and build with static/build.json (needs nothing)

A user needs no node, because the build is committed. After a merge that touches the source, build again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "services" / "gateway" / "page"
STATIC = PAGE / "static"
MANIFEST = STATIC / "build.json"
SOURCES = ("index.html", "package.json", "package-lock.json", "tsconfig.json", "vite.config.ts", "src/**/*")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("command", choices=("build", "check"))
    return build() if parser.parse_args(argv).command == "build" else check()


def build() -> int:
    """Build the page and note what it was built of."""
    for command in (["npm", "ci", "--no-audit", "--no-fund"], ["npm", "run", "--silent", "build"]):
        try:
            subprocess.run(command, cwd=PAGE, check=True)
        except FileNotFoundError:
            print("page: npm is not here; on Debian or Ubuntu: apt-get install nodejs npm", file=sys.stderr)
            return 1
        except subprocess.CalledProcessError as error:
            return error.returncode
    MANIFEST.write_text(json.dumps(hashes(), indent=1) + "\n")
    return 0


def check() -> int:
    """0 if the build is that of the source."""
    noted = json.loads(MANIFEST.read_text()) if MANIFEST.is_file() else {}
    changed = [name for name, value in hashes().items() if noted.get(name) != value]
    if changed:
        print(f"page: {' and '.join(changed)} changed after the last build: run `make page`", file=sys.stderr)
    return bool(changed)


def hashes() -> dict[str, str]:
    """One hash of the source and one of the build."""
    sources = (path for pattern in SOURCES for path in PAGE.glob(pattern))
    return {"source": _hash(sources), "build": _hash(path for path in STATIC.rglob("*") if path != MANIFEST)}


def _hash(paths: Iterable[Path]) -> str:
    total = hashlib.sha256()
    for path in sorted(path for path in paths if path.is_file()):
        name, content = path.relative_to(PAGE).as_posix(), path.read_bytes()
        total.update(f"{name} {len(content)}\n".encode())
        total.update(content)
    return total.hexdigest()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
