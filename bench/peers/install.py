"""Installs the peers from PyPI, each into a virtual environment of its own outside the repository.

    python bench/peers/install.py [sglang-router smg vllm-router]

nginx, which is measured as a floor, comes from the distribution: apt-get install nginx-light.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from routers import NGINX, VENVS

PACKAGES = {"sglang-router": "0.3.2", "smg": "1.13.0", "vllm-router": "0.1.17"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", help=f"of {', '.join(PACKAGES)}; all if left out")
    names = parser.parse_args().packages or list(PACKAGES)
    if unknown := set(names) - PACKAGES.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    for name in names:
        python = VENVS / name / "bin" / "python"
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(VENVS / name)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", f"{name}=={PACKAGES[name]}"], check=True)
        print(f"{name} {PACKAGES[name]}: {VENVS / name}")
    if not NGINX.exists():
        print(f"{NGINX} is missing: apt-get install nginx-light")
    return 0


if __name__ == "__main__":
    sys.exit(main())
