"""The package: `yuan_train` and its kernels, which are imported as `yuan_kernels`."""

from setuptools import find_packages, setup

setup(
    name="yuan-train",
    version="0.1.0",
    description="Training of large language models on clusters of heterogeneous GPUs",
    long_description=open("README.md", encoding="utf-8").read(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    # PyPI has another project called `kernels`, so ours is imported under a name of its own.
    package_dir={"yuan_kernels": "kernels"},
    packages=["yuan_kernels", *find_packages(include=["yuan_train", "yuan_train.*"])],
    # Model code for the models that export-hf writes: data here, run by transformers there.
    package_data={"yuan_train": ["hf_export/*.py"]},
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
        "megatron": ["megatron-core>=0.16,<0.17"],
        "parquet": ["pyarrow"],
        "test": [
            "pytest",
            "pytest-xdist",
            "hypothesis",
            "ruff",
            "pyright",
            "highspy",
            "transformers",
            "pyarrow",
            # Has wheels for Linux alone; elsewhere the tests of the second engine are skipped.
            "megatron-core>=0.16,<0.17; sys_platform == 'linux'",
            # Only Linux on x86-64 and arm64 has wheels; elsewhere the tests of these kernels are skipped.
            "triton; sys_platform == 'linux'",
        ],
    },
    entry_points={"console_scripts": ["yuan-train = yuan_train.cli.main:main"]},
)
