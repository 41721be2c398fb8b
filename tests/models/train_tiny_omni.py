"""Makes the tiny omni model: `tiny_text/` with frozen vision and audio towers.

`python -m tests.models.train_tiny_omni --out DIR` takes about ten minutes on one core with
OpenBLAS preloaded, which is why the weights are committed. The language part begins with the
weights of `tiny_text/`, so that the model still answers questions without images and sounds.
"""

from __future__ import annotations

import random
from functools import partial

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_vlm.models.minicpmo.config import ModelConfig
from mlx_vlm.models.minicpmo.minicpmo import Model
from mlx_vlm.models.minicpmo.processing_minicpmo import MiniCPMOProcessor

from tests.models.tiny_omni_batches import batches
from tests.models.tiny_omni_files import config, write_processor
from tests.models.tiny_omni_senses import features_of, paintings, recordings, settle
from tests.models.train_tiny_vision import arguments_of, resume, save, text_part, train

SEED = 29


def main() -> None:
    arguments = arguments_of(__doc__, steps=400)
    directory = arguments.out
    mx.random.seed(SEED)
    write_processor(directory)
    model = Model(ModelConfig.from_dict(config()))
    text = text_part(config()["vocab_size"])
    processor = MiniCPMOProcessor.from_pretrained(directory)
    # Each number of steps gets its own images and sounds.
    rng = random.Random(f"{SEED} {arguments.steps}")
    painted, played = paintings(rng), recordings(rng)
    if arguments.resume:
        resume(model, text, directory)
    else:
        model.language_model.load_weights(list(tree_flatten(text.parameters())))
        images, sounds = [image for _, image in painted], [samples for _, samples in played]
        settle(model, processor, images[::8], sounds[::8])
    collection = features_of(model, processor, painted, played)
    train(
        text,
        collection.features,
        mx.zeros_like(collection.features),
        partial(batches, processor.tokenizer, collection),
        arguments.steps,
        lambda: save(model, text, directory),
    )


if __name__ == "__main__":
    main()
