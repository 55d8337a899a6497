"""The package: `yuan_train`, its kernels (imported as `yuan_kernels`), and the planner's core in C."""

import runpy
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

NATIVE = Path("yuan_train/planner/native")
LIBRARY = runpy.run_path(str(NATIVE / "library.py"))


class BuildCore(build_ext):
    """Builds the planner's core with any C compiler: a library that is loaded, not a module of Python."""

    def run(self) -> None:
        LIBRARY["build"](self._folder())

    def get_outputs(self) -> list[str]:
        return [str(self._folder() / LIBRARY["library_name"]())]

    def get_output_mapping(self) -> dict[str, str]:
        return {}

    def _folder(self) -> Path:
        return NATIVE if self.inplace or self.editable_mode else Path(self.build_lib) / NATIVE


setup(
    name="yuan-train",
    version="0.1.0",
    description="Training of large language models on clusters of heterogeneous GPUs",
    long_description=open("README.md", encoding="utf-8").read(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    # PyPI has another project called `kernels`, so ours is imported under a name of its own.
    # Models, clusters, first files and schemas come along as data, from the folder where a checkout has them.
    package_dir={"yuan_kernels": "kernels", "yuan_train.configs": "configs"},
    packages=["yuan_kernels", "yuan_train.configs", *find_packages(include=["yuan_train", "yuan_train.*"])],
    # Model code for the models that export-hf writes: data here, run by transformers there.
    package_data={
        "yuan_train": ["hf_export/*.py", "planner/native/*.[ch]", "serve/*.html"],
        "yuan_train.configs": ["*/*.yaml", "schema/*.json"],
    },
    # What it is made of is library.py's to say; its name makes a wheel one of a platform.
    ext_modules=[Extension("yuan_train.planner.native.core", sources=[])],
    cmdclass={"build_ext": BuildCore},
    install_requires=[
        "torch>=2.11",
        "numpy",
        "sentencepiece",
        # Tokenizers and chat templates of Hugging Face's: every model that import-hf reads has them.
        "tokenizers",
        "jinja2>=3.1",
        "PyYAML",
        "pydantic>=2",
        "annotated-types",
        "safetensors",
    ],
    extras_require={
        "report": ["tensorboard"],
        "wandb": ["wandb"],
        "mlflow": ["mlflow"],
        "trackio": ["trackio"],
        "megatron": ["megatron-core>=0.16,<0.17"],
        "parquet": ["pyarrow"],
        "serve": ["fastapi", "uvicorn"],
        "math": ["math-verify"],
        "docs": ["mkdocs-material"],
        "test": [
            "pytest",
            "pytest-xdist",
            "hypothesis",
            "jsonschema",
            "mkdocs-material",
            "peft",
            "ruff",
            "pyright",
            "highspy",
            "transformers",
            "pyarrow",
            "fastapi",
            "uvicorn",
            "openai",
            "httpx",
            # Has wheels for Linux alone; elsewhere the tests of the second engine are skipped.
            "megatron-core>=0.16,<0.17; sys_platform == 'linux'",
            # A C compiler, for the test of machines that have none of their own.
            "ziglang",
            # Only Linux on x86-64 and arm64 has wheels; elsewhere the tests of these kernels are skipped.
            "triton; sys_platform == 'linux'",
        ],
    },
    entry_points={"console_scripts": ["yuan-train = yuan_train.cli.main:program"]},
)
