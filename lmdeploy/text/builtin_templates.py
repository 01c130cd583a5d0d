"""Chat formats known by name: the public prompt formats of models whose files may come without a template.

The strings are fields of a ChatTemplateConfig. `joined`: a system text is part of the first user turn, which
it opens. Newer models carry their own template, so no further name is needed; "hf" means just that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

OWN = "hf"  # the template in the model's files


@dataclass(frozen=True, slots=True)
class BuiltIn:
    fields: Mapping[str, str]
    joined: bool = False
    stop_words: tuple[str, ...] = ()


_LLAMA2 = BuiltIn(
    {
        "system": "[INST] <<SYS>>\n",
        "eosys": "\n<</SYS>>\n\n",
        "user": "[INST] ",
        "eoh": " [/INST]",
        "assistant": " ",
        "eoa": " </s>",
        "separator": "<s>",
    },
    joined=True,
)
_MISTRAL = BuiltIn(
    {
        "system": "[INST] ",
        "eosys": "\n\n",
        "user": "[INST] ",
        "eoh": " [/INST]",
        "assistant": " ",
        "eoa": "</s>",
    },
    joined=True,
)
_VICUNA = BuiltIn(
    {
        "meta_instruction": "A chat between a curious user and an artificial intelligence assistant. The"
        " assistant gives helpful, detailed, and polite answers to the user's questions.",
        "eosys": " ",
        "user": "USER: ",
        "eoh": " ",
        "assistant": "ASSISTANT: ",
        "eoa": "</s>",
    },
    stop_words=("</s>",),
)

BUILT_IN: dict[str, BuiltIn] = {
    "base": BuiltIn({}),
    "llama2": _LLAMA2,
    "codellama": _LLAMA2,
    "mistral": _MISTRAL,
    "mixtral": _MISTRAL,
    "vicuna": _VICUNA,
}
