"""What others' clients make of the gateway: curl, OpenAI's package for JavaScript, and a fuzzer by /openapi.json.

OpenAI's package for Python is in test_streams.py.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from serving import CHAT_PATH, Stack, script

TEXT = "Grüße, 世界 💡!\n\ndata: [DONE]\n"
# The newest that runs on Node 20; it has no dependencies.
OPENAI_FOR_JAVASCRIPT = "openai@6.10.0"
JAVASCRIPT = """
import OpenAI from "openai";
const client = new OpenAI({baseURL: process.argv[2] + "/v1", apiKey: "none", maxRetries: 0});
const messages = JSON.parse(process.argv[3]);
const stream = await client.chat.completions.create({model: "auto", messages, stream: true});
const deltas = [];
for await (const chunk of stream) deltas.push(chunk.choices[0]?.delta?.content ?? "");
const whole = await client.chat.completions.create({model: "auto", messages});
const refused = await client.chat.completions.create({model: "auto", messages, max_tokens: 0}).catch(error => error);
const models = (await client.models.list()).data.map(model => model.id);
console.log(JSON.stringify({
  deltas, whole: whole.choices[0].message.content, models,
  refused: [refused.constructor.name, refused.status, refused.param, refused.requestID.length > 0],
}));
"""


def test_curl(scripted_stack: Stack) -> None:
    body = json.dumps({"messages": script(text=TEXT), "stream": True})
    command = ["curl", "-sSN", "-m", "20", "-H", "Content-Type: application/json", "-d", body]
    done = subprocess.run([*command, scripted_stack.url + CHAT_PATH], capture_output=True, timeout=30, check=True)
    *events, done_event, end = done.stdout.decode().split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == TEXT
    assert (done_event, end) == ("data: [DONE]", "")


@pytest.mark.skipif(shutil.which("npm") is None, reason="node and npm are not installed")
def test_openai_for_javascript(scripted_stack: Stack, tmp_path: Path) -> None:
    install = ["npm", "install", "--prefix", str(tmp_path), "--no-audit", "--no-fund", "--ignore-scripts"]
    subprocess.run([*install, OPENAI_FOR_JAVASCRIPT], check=True, capture_output=True, timeout=50)
    program = tmp_path / "client.mjs"
    program.write_text(JAVASCRIPT)
    command = ["node", str(program), scripted_stack.url, json.dumps(script(text=TEXT))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert ("".join(seen["deltas"]), seen["whole"]) == (TEXT, TEXT)
    assert len(seen["deltas"]) > 5 and "auto" in seen["models"]
    assert seen["refused"] == ["BadRequestError", 400, "max_tokens", True]


@pytest.mark.timeout(120)
def test_the_description_is_fuzzed(scripted_stack: Stack, tmp_path: Path) -> None:
    """Whatever the fuzzer sends to any path: no 5xx, only what the description names, and wrong types are refused."""
    checks = ("not_a_server_error", "status_code_conformance", "content_type_conformance", "negative_data_rejection")
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{scripted_stack.url}/openapi.json"),
        *("--checks", ",".join((*checks, "response_schema_conformance", "allow_header_conformance"))),
        *("--phases", "coverage,fuzzing", "--max-time", "30", "--generation-database", "none", "--no-color"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    num_cases = re.search(r"(\d+) generated", done.stdout)
    assert num_cases and int(num_cases[1]) > 300, done.stdout[-2000:]
    assert "Traceback" not in scripted_stack.log("gateway")
