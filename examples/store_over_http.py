"""Use the store over HTTP, with nothing but an HTTP client: put, read a range, list, look at one chunk, remove.

Needs the store's gateway: `tanghulu up --store-http-port 7480`, or `tanghulu store serve` beside a running store. You
will see the status of each call and what came back. The gateway's /docs lists all routes.

    python examples/store_over_http.py [URL, default http://127.0.0.1:7480]
"""

import sys

import httpx


def main(url: str) -> None:
    with httpx.Client(base_url=url, timeout=30) as http:
        http.delete("/v1/chunks", params={"prefix": "example/http/"}).raise_for_status()

        answer = http.put("/v1/values/example/http/answer", params={"ttl_s": 600}, content=b"forty-two")
        print("put:", answer.status_code)
        answer = http.put("/v1/values/example/http/answer", content=b"forty-two")
        print("put again, a hit:", answer.status_code)

        whole = http.get("/v1/values/example/http/answer")
        print("get:", whole.status_code, whole.content)
        part = http.get("/v1/values/example/http/answer", headers={"range": "bytes=6-8"})
        print("get a range:", part.status_code, part.content)
        fresh = http.get("/v1/values/example/http/answer", headers={"if-none-match": whole.headers["etag"]})
        print("get if it changed:", fresh.status_code)

        page = http.get("/v1/chunks", params={"prefix": "example/http/"}).json()
        print("keys:", [chunk["key"] for chunk in page["chunks"]])
        print("size:", http.get("/v1/chunks/example/http/answer").json()["size_bytes"])

        print("remove:", http.delete("/v1/chunks/example/http/answer").status_code)
        gone = http.get("/v1/values/example/http/answer")
        print("get what is gone:", gone.status_code, gone.json()["error"]["code"])


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:7480")
