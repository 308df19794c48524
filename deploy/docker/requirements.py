"""Print what pyproject.toml requires, one requirement a line: `requirements.py EXTRA < pyproject.toml`.

The image installs this list in a layer of its own, before it sees a line of Paceline's code, so that a change of code
does not install everything anew. An extra that names the project itself (`paceline[worker]`) is followed.
"""

import re
import sys
import tomllib


def requirements(project: dict[str, object], extra: str) -> list[str]:
    """The requirements of one extra, without duplicates. KeyError if there is no such extra."""
    extras = project["optional-dependencies"]
    assert isinstance(extras, dict)
    own = re.compile(rf"{re.escape(str(project['name']))}\[([^\]]+)\]")
    found: list[str] = []
    for requirement in extras[extra]:
        if match := own.fullmatch(requirement.strip()):
            for name in match[1].split(","):
                found += requirements(project, name.strip())
        else:
            found.append(requirement)
    return list(dict.fromkeys(found))


if __name__ == "__main__":
    project = tomllib.load(sys.stdin.buffer)["project"]
    print("\n".join([*project["dependencies"], *requirements(project, sys.argv[1])]))
