// A worker that all pages of one browser share: browsers allow a service six connections, and a stream keeps one.

import { Stream } from "./stream.js";

const ports = new Set();
const stream = new Stream((message) => { for (const port of ports) port.postMessage(message); });

addEventListener("connect", ({ ports: [port] }) => {
  port.onmessage = ({ data }) => {
    if (data === "hello") {
      ports.add(port);
      if (stream.isOpen) port.postMessage({ state: stream.state });
      else stream.open();
    } else if (data === "bye") {
      ports.delete(port);
      port.close();
      if (!ports.size) stream.close();
    }
  };
});
