"""Speculative decoding with the multirate accelerator in this folder.

transformers runs this file for
`model.generate(..., custom_generate="<this folder or its hub id>", trust_remote_code=True)`.
All code is in the package: pip install multirate
"""

from multirate.decode.hf import generate_from_folder


def generate(model, **kwargs):
    return generate_from_folder(model, **kwargs)
