# SPDX-License-Identifier: Apache-2.0
"""Chat templates of common formats, in words of ours: what public templates of these names write, theirs write, too.

Those of the package `trl` are read where it is installed (trl_templates()).
"""
from __future__ import annotations

import importlib.util
import pathlib

_ALTERNATE = ("{% for m in rest %}{% if (m.role == 'user') == (loop.index0 % 2 == 1) %}"
              "{{ raise_exception('turns of user and assistant alternate') }}{% endif %}")


def _turns(user: str, assistant: str, prompt: str = "", system: str = "{{ head | trim }}\n\n", begin: str = "") -> str:
    """A system text first, then turns that alternate. `C`: a content, as the format strips it."""
    said = "{{ m.content | trim }}"
    return ("{% set rest = messages %}{% set head = none %}{% if messages[0].role == 'system' %}"
            "{% set head = messages[0].content %}{% set rest = messages[1:] %}{% endif %}" + begin
            + "{% if head is not none %}" + system + "{% endif %}" + _ALTERNATE
            + "{% if m.role == 'user' %}" + user.replace("C", said) + "{% else %}" + assistant.replace("C", said)
            + "{% endif %}{% endfor %}{% if add_generation_prompt %}" + prompt + "{% endif %}")


def _named(header: str, end: str, prompt: str, begin: str = "") -> str:
    """Every message between a header with its role and an end."""
    return (begin + "{% for m in messages %}" + header + "{{ m.content | trim }}" + end + "{% endfor %}"
            "{% if add_generation_prompt %}" + prompt + "{% endif %}")


_NL = "{{ '\n' }}"
FORMATS = {
    "alpaca": _turns("### Instruction:\nC\n\n", "### Response:\nC{{ eos_token }}" + _NL * 2, "### Response:" + _NL,
                     begin="{{ bos_token }}"),
    "amberchat": _turns("###Human: C" + _NL, "###Assistant: C" + _NL, "###Assistant:", "{{ head | trim }}" + _NL,
                        "{{ bos_token }}"),
    "chatml": _named("<|im_start|>{{ m.role }}" + _NL, "<|im_end|>" + _NL, "<|im_start|>assistant" + _NL, "{{ bos_token }}"),
    "chatqa": _turns(_NL * 2 + "User: C", _NL * 2 + "Assistant: C", _NL * 2 + "Assistant:", "System: {{ head | trim }}",
                     "{{ bos_token }}"),
    "falcon": _turns(_NL * 2 + "User: C", _NL * 2 + "Assistant: C", _NL * 2 + "Assistant:", "{{ head }}"),
    "gemma-it": _turns("<start_of_turn>user\nC<end_of_turn>" + _NL, "<start_of_turn>model\nC<end_of_turn>" + _NL,
                       "<start_of_turn>model" + _NL, "{{ raise_exception('no system') }}", "{{ bos_token }}"),
    "granite-3": ("{% if tools %}<|start_of_role|>available_tools<|end_of_role|>\n{% for tool in tools %}"
                  "{{ tool | tojson(indent=4) }}{% if not loop.last %}" + _NL * 2 + "{% endif %}{% endfor %}<|end_of_text|>\n{% endif %}"
                  "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}<|start_of_role|>{{ m.role }}<|end_of_role|>"
                  "{{ m.content }}<|end_of_text|>\n{% endif %}{% if loop.last and add_generation_prompt %}"
                  "<|start_of_role|>assistant<|end_of_role|>{% endif %}{% endfor %}"),
    "llama-2": _turns("{{ bos_token }}[INST] {% if loop.first and head is not none %}<<SYS>>\n{{ head }}\n<</SYS>>\n\n{% endif %}C [/INST]",
                      " C {{ eos_token }}", "", ""),
    "llama-3": _named("<|start_header_id|>{{ m.role }}<|end_header_id|>" + _NL * 2, "<|eot_id|>",
                      "{% if messages[-1].role == 'user' %}<|start_header_id|>assistant<|end_header_id|>" + _NL * 2 + "{% endif %}",
                      "{{ bos_token }}"),
    "mistral": _turns("[INST] {% if loop.first and head is not none %}{{ head | trim }}\n\n{% endif %}C [/INST]",
                      " C {{ eos_token }}", "", "", "{{ bos_token }}"),
    "openchat": _named("GPT4 Correct {{ m.role | title }}: ", "<|end_of_turn|>", "GPT4 Correct Assistant:", "{{ bos_token }}"),
    "orca": ("{% for m in messages %}{{ '\n' if not loop.first }}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>{% endfor %}"
             "{% if add_generation_prompt %}\n<|im_start|>assistant" + _NL + "{% endif %}"),
    "phi-3": _named("<|{{ m.role }}|>" + _NL, "<|end|>" + _NL, "<|assistant|>" + _NL),
    "phi-3-end": ("{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
                  "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"),
    "saiga": _named("{{ bos_token }}{{ 'bot' if m.role == 'assistant' else m.role }}" + _NL, "{{ eos_token }}", "{{ bos_token }}bot" + _NL),
    "solar": _named("### {{ m.role | title }}:" + _NL, _NL * 2, "### Assistant:" + _NL, "{{ bos_token }}"),
    "vicuna": _turns("USER: C" + _NL, "ASSISTANT: C{{ eos_token }}" + _NL, "ASSISTANT:", begin="{{ bos_token }}"),
    "zephyr": ("{% for m in messages %}<|{{ m.role }}|>\n{{ m.content | trim }}{{ eos_token }}"
               "{% if loop.last and m.role == 'user' and add_generation_prompt %}<|assistant|>\n{% endif %}{% endfor %}"),
    # What answers are told from the rest by, where a prefix of the chat is no prefix of its text.
    "think-last": ("{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
                   "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and "
                   "loop.index0 > ns.last %}<think>\n{{ m.reasoning_content | default('') | trim }}\n</think>\n\n{% endif %}"
                   "{{ m.content.split('</think>')[-1].lstrip('\n') }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}"
                   "<|im_start|>assistant\n<think>\n{% endif %}"),
    "end-by-place": ("{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>"
                     "{{ m.content }}{% if loop.last and m.role == 'assistant' %}<|return|>{% else %}<|end|>{% endif %}{% endfor %}"
                     "{% if add_generation_prompt %}<|start|>assistant{% endif %}"),
    "answers-of-tools": ("{% for m in messages %}{% if m.role != 'tool' %}<|turn>{{ m.role }}\n{{ m.content }}"
                         "{% for call in m.tool_calls or [] %}<|call>{{ call.function.name }}{{ call.function.arguments | tojson }}<call|>"
                         "{% endfor %}{% if m.tool_calls %}{% for k in range(loop.index, messages | length) %}{% set next = messages[k] %}"
                         "{% if next.role != 'tool' %}{% break %}{% endif %}<|answer>{{ next.content }}<answer|>{% endfor %}{% endif %}"
                         "<turn|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|turn>assistant\n{% endif %}"),
}


def trl_templates() -> dict[str, str]:
    """Those of the package `trl`, by name; none where it is not installed."""
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        return {}
    folder = pathlib.Path(spec.origin).parent / "chat_templates"
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.jinja"))}
