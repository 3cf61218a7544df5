"""The base model."""

from typing import Annotated, Literal

from pydantic import Field

from opdctl.fields import Count, Positive, Settings


class Qwen3Shape(Settings):
    """A Qwen3 network to be initialised at random; names as in the `transformers` configuration."""

    num_hidden_layers: Count
    hidden_size: Count
    intermediate_size: Count
    num_attention_heads: Count
    num_key_value_heads: Count
    head_dim: Count
    rope_theta: Positive = 10_000.0
    max_position_embeddings: Count = 128
    tie_word_embeddings: bool = True
    rms_norm_eps: Positive = 1e-6


class WordTokenizer(Settings):
    """One token a word, words separated by blanks. The first three words are padding, begin and end of sequence."""

    words: Annotated[list[str], Field(min_length=4)]


class NewModel(Settings):
    """A base model made here, from a shape and a seed: what a laptop recipe starts from."""

    source: Literal["new"]
    shape: Qwen3Shape
    tokenizer: WordTokenizer


class FolderModel(Settings):
    """A folder in Hugging Face format with safetensors weights (`path:DIR`), one of the Hugging Face hub
    (`hf:REPO@REVISION`), or a GGUF file (`gguf:FILE`), which is imported once."""

    source: Literal["folder"]
    ref: Annotated[str, Field(pattern=r"^(path|hf|gguf):.+$")]


ModelSettings = Annotated[NewModel | FolderModel, Field(discriminator="source")]
