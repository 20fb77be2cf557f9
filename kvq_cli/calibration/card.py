"""The card of an artifact (its README.md): method, model, data, command and measured errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvq_cli.artifact.errors import method_of
from kvq_cli.artifact.names import TUNING_FILE


def card(config: Mapping[str, Any], command: str) -> str:
    """The card as Markdown. config: the artifact's. command: the `kvq calibrate` command line that reproduces it."""
    method, model, layers = config["method"], config["model"], config["errors"]["layers"]
    options = ", ".join(f"{key}={value}" for key, value in method.items() if key != "name")
    revision = f" at revision {model['revision']}" if model["revision"] else ""
    if method["name"] == "mixed":
        data, more = _data(config), ""
        head = ["layer", "keys: method, fisher, plain", "values: method, fisher, plain"]
        rows = [[_part(config, index, kind) for kind in "kv"] for index in range(len(layers))]
    elif "captured" in config and "bytes" in layers[0]["k"]:
        data = _data(config)
        more = " Bytes: of a packed token. Effective tokens: those that a mean weighted by squared gradients is of."
        columns = "bytes, effective tokens, loss, fisher, plain"
        head = ["layer", f"keys: {columns}", f"values: {columns}"]
        rows = [[_coded(layer["k"]), _coded(layer["v"])] for layer in layers]
    elif "captured" in config:
        data = _data(config)
        head = ["layer", "keys: shape, fisher, plain, correlation", "values: shape, fisher, plain, correlation"]
        rows = [[_stream(layer["k"]), _stream(layer["v"])] for layer in layers]
        more = " Then the correlation of adjacent tokens."
    else:
        data, more = _text(config["calibration"]) or "none; factors of the model's own weights", ""
        head = ["layer", "factors: rank, residual, energy"]
        rows = [["; ".join(_factors(name, errors) for name, errors in layer.items()) or "none"] for layer in layers]
    return "\n".join(
        [
            f"# {method['name']} for {model['name']}",
            "",
            f"A calibrated key-value cache compression of kvq for the model `{model['name']}`{revision}; "
            "it fits no other model.",
            "",
            f"- Method: {method['name']} ({options})",
            f"- Data: {data}",
            f"- Size: {config['sizes']['total']:,} bytes of tensors",
            "",
            "Made by",
            "",
            f"    {command}",
            "",
            "## Measured error",
            "",
            f"Measured {config['errors']['measure']}.{more}",
            "",
            f"| {' | '.join(head)} |",
            f"|{'---|' * len(head)}",
            *(f"| {' | '.join([str(index), *row])} |" for index, row in enumerate(rows)),
            "",
            *(_tuning(config["tuning"]) if "tuning" in config else ()),
        ]
    )


def _text(settings: Mapping[str, Any]) -> str:
    if not settings:
        return ""
    samples = f"{settings['samples']} samples of {settings['seqlen']} tokens"
    return f"`{settings['dataset']}`, {samples}, seed {settings['seed']}"


def _data(config: Mapping[str, Any]) -> str:
    captured = config["captured"]
    return (
        f"{_text(config['calibration'])}; {captured['tokens']:,} tokens captured, "
        f"{captured['tokens_with_gradients']:,} of them with gradients, "
        f"{captured['tokens_held_out']:,} of these held out"
    )


def _part(config: Mapping[str, Any], layer: int, kind: str) -> str:
    chosen = config["errors"]["layers"][layer][kind]["chosen"]
    return f"{method_of(config, layer, kind)}, {chosen['fisher']:.4f}, {chosen['plain']:.4f}"


def _tuning(tuning: Mapping[str, Any]) -> list[str]:
    """How the methods were chosen: what was tried, and the least KL predicted at other bits."""
    goal = f"least KL within {tuning['budget']:g} bits"
    if tuning["objective"] == "memory":
        goal = f"fewest bits with a KL of at most {tuning['kl']:g}"
    chosen = tuning["chosen"]
    return [
        "## Choice",
        "",
        f"Chosen by `kvq tune` for {goal}: packed bits per number, and KL to the uncompressed model in nats per token "
        f"on {tuning['windows']} windows of {tuning['seqlen']} tokens of each of {', '.join(tuning['text'])}, of which "
        "the second half is scored. These windows chose the configuration: on other text its KL may be higher.",
        "",
        f"![KL over bits, and bits of each layer]({TUNING_FILE})",
        "",
        "| tried | packed bits | KL |",
        "|---|---|---|",
        *(
            f"| {one['step']}{' (chosen)' if index == chosen else ''} | {one['bits']:.3f} | {one['kl']:.5f} |"
            for index, one in enumerate(tuning["tried"])
        ),
        "",
        f"Candidates: {', '.join(tuning['candidates'])}. Least KL predicted at other bits, from the KL of each stream "
        "alone:",
        "",
        "| bits | KL |",
        "|---|---|",
        *(f"| {one['bits']:g} | {one['kl']:.5f} |" for one in tuning["predicted"]),
        "",
    ]


def _factors(name: str, errors: Mapping[str, Any]) -> str:
    return f"{name}: {errors['rank']}, {errors['residual']:.1e}, {errors['energy']:.3f}"


def _coded(errors: Mapping[str, Any]) -> str:
    chosen, tokens = errors["chosen"], round(errors["effective_tokens"])
    return f"{errors['bytes']}, {tokens:,}, {chosen['loss']:.4f}, {chosen['fisher']:.4f}, {chosen['plain']:.4f}"


def _stream(errors: Mapping[str, Any]) -> str:
    chosen, shapes = errors["chosen"], sorted(set(errors["choice"]))
    return (
        f"{'+'.join(shapes)}, {chosen['fisher']:.4f}, {chosen['plain']:.4f}, {errors['adjacent_token_correlation']:.2f}"
    )
