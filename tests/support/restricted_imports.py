"""What an image without the rest of this environment would do."""

ONLY = """
import sys
from importlib import metadata
from importlib.abc import MetaPathFinder
from packaging.requirements import Requirement

def plain(name):
    return name.lower().replace("_", "-")

def closure(name, found):
    if plain(name) not in found:
        found.add(plain(name))
        for line in metadata.requires(name) or ():
            one = Requirement(line)
            if one.marker is None or one.marker.evaluate({"extra": ""}):
                closure(one.name, found)
    return found

allowed = set()
for name in sys.argv[1].split():
    closure(name, allowed)
owners = metadata.packages_distributions()

class Refuse(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in owners and top != "sm_train" and not allowed & set(map(plain, owners[top])):
            raise ImportError(f"{name} is not in the image")

for name in [n for n in sys.modules if n.partition(".")[0] in owners]:
    del sys.modules[name]
sys.meta_path.insert(0, Refuse())
"""
"""The beginning of a program: only the distributions named in its first argument, and what they
require, can be imported.
"""
