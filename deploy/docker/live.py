"""The image's health check: whether the process of this container answers /live on its metrics port."""

import http.client
import os
import ssl
import sys

port = int(os.environ["TANGHULU_METRICS_PORT"])
connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
if os.environ.get("TANGHULU_TLS_CERT"):
    # The container asks itself: nothing is sent that a certificate would protect.
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=2, context=context)
connection.request("GET", "/live")
sys.exit(connection.getresponse().status != http.HTTPStatus.OK)
