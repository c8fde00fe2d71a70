"""Stream an answer over gRPC with NVIDIA's client alone (pip install 'tritonclient[grpc]').

python examples/grpc_stream.py "What is the capital of France?" --url 127.0.0.1:9001
"""

import argparse
import contextlib
import json
import queue
import sys

import numpy as np
import tritonclient.grpc as triton


def stream(url: str, request: dict, ca: str | None = None, headers: dict[str, str] | None = None):
    """Yield the orchestrator's events for one OpenAI chat-completion request; raises its error.

    `ca` is a file with the certificates to trust; with it the connection uses TLS. `headers` go as gRPC metadata.
    """
    responses: queue.Queue = queue.Queue()
    with triton.InferenceServerClient(url, ssl=ca is not None, root_certificates=ca) as client:
        client.is_server_live()  # says what is wrong when there is none
        client.start_stream(lambda result, error: responses.put((result, error)), headers=headers)
        body = triton.InferInput("request", [1], "BYTES")
        body.set_data_from_numpy(np.array([json.dumps(request)], dtype=np.object_))
        # The empty final response tells when a decoupled model has said everything.
        try:
            with contextlib.suppress(triton.InferenceServerException):  # refused already; the callback is told why
                client.async_stream_infer("orchestrator", [body], enable_empty_final_response=True)
            while True:
                result, error = responses.get(timeout=600)
                if error:
                    raise error
                event = result.as_numpy("event")
                if event is not None and event.size:
                    yield json.loads(event[0])
                if result.get_response().parameters["triton_final_response"].bool_param:
                    return
        finally:
            client.stop_stream(cancel_requests=True)  # leaving early ends the generation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", nargs="?", default="What is the capital of France? Answer in one sentence.")
    parser.add_argument("--url", default="127.0.0.1:9001", help="the gRPC front's address (%(default)s)")
    parser.add_argument("--ca", metavar="PEM", help="use TLS, and trust these certificates")
    parser.add_argument("--header", action="append", default=[], metavar="NAME:VALUE", help="such as authorization")
    args = parser.parse_args()
    headers = dict(header.split(":", 1) for header in args.header)
    request = {"model": "auto", "messages": [{"role": "user", "content": args.question}], "stream": True}
    try:
        for event in stream(args.url, request, args.ca, headers):
            for choice in event["choices"]:
                print(choice["delta"].get("content", ""), end="", flush=True)
            if "rt" in event:
                print("\n" + json.dumps(event["rt"]))
    except triton.InferenceServerException as error:
        hint = ""
        if error.status() == "StatusCode.UNAVAILABLE":
            hint = f"\nfix: is the server up, and its gRPC front at {args.url}? (--url)"
            if "restricted" in error.message():
                hint = f"\nfix: {args.url} is Triton's own port, which is locked; --url takes the gRPC front's (9001)"
        sys.exit(f"error: {error.message()}{hint}")


if __name__ == "__main__":
    main()
