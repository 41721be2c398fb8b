// The gateway's HTTP API, as far as this page uses it.

/** A refusal or a failure, with the server's message. */
export class ApiFailure extends Error {
  constructor(message, { status = 0, param = null } = {}) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

function headers(key) {
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function asked(path, options) {
  try {
    return await fetch(path, { cache: "no-store", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiFailure("The gateway cannot be reached. Is it still running?");
  }
}

async function refusal(response, key) {
  let error = null;
  try {
    error = (await response.json()).error;
  } catch {
    // The body may be a proxy's page, or empty: then only the status is known.
  }
  if (response.status === 401) {
    return new ApiFailure(key ? "The gateway does not accept this API key." : "The gateway requires an API key.", { status: 401 });
  }
  const sentence = error?.message ?? `The gateway answered with HTTP status ${response.status}.`;
  return new ApiFailure(sentence, { status: response.status, param: error?.param ?? null });
}

/** The body of a GET as JSON. */
export async function read(path, key) {
  const response = await asked(path, { headers: headers(key) });
  if (!response.ok) throw await refusal(response, key);
  return response.json();
}

/** POST a body as JSON, and read the answer. */
export async function post(path, body, key) {
  const response = await asked(path, {
    method: "POST",
    headers: { "content-type": "application/json", ...headers(key) },
    body: JSON.stringify(body),
  });
  if (!response.ok) throw await refusal(response, key);
  return response.json();
}

/** The chunks of a streamed chat completion. Throws ApiFailure, also if the stream ends early. */
export async function* chat(body, key, signal) {
  const response = await asked("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json", ...headers(key) },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  if (!response.ok) throw await refusal(response, key);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiFailure(chunk.error.message, { param: chunk.error.param });
    yield chunk;
  }
  throw new ApiFailure("The answer is incomplete: the connection was closed.");
}

// The data of server-sent events (WHATWG HTML, "Interpreting an event stream").
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      let read;
      try {
        read = await reader.read();
      } catch (error) {
        if (error.name === "AbortError") throw error;
        throw new ApiFailure("The answer is incomplete: the connection to the gateway was lost.");
      }
      if (read.done) return;
      const lines = (rest + read.value).split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        else if (!line && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
