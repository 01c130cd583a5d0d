// The API as this page uses it. Knows fields and errors; nothing of what is shown.

import { events } from "./sse.js";

// Below the address of the page: a gateway may have put it into a folder.
const at = (path) => new URL(path.replace(/^\//, ""), document.baseURI);

function headers(key) {
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

async function failure(response) {
  const text = await response.text();
  let message = text.slice(0, 500);
  try {
    message = JSON.parse(text).error.message ?? message;
  } catch {
    // A gateway in between answers in its own words.
  }
  return new ApiError(message || response.statusText, response.status);
}

// The JSON body of a GET; health answers also have one when they are bad.
export async function get(path, key, anyStatus = false) {
  const response = await fetch(at(path), { headers: headers(key) });
  if (!response.ok && !anyStatus) throw await failure(response);
  return response.json();
}

// Calls `tell` with {content, reasoning, tools, finish, usage} as they come. Rejects with ApiError, and with
// AbortError after `signal`.
export async function chat(body, key, signal, tell) {
  const response = await fetch(at("/v1/chat/completions"), {
    method: "POST", headers: headers(key), body: JSON.stringify(body), signal,
  });
  if (!response.ok) throw await failure(response);
  if (!body.stream) return told(await response.json(), "message", tell);
  let ended = false;
  for await (const data of events(response)) {
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message, 200);
    ended = told(chunk, "delta", tell) || ended;
  }
  if (!ended) throw new ApiError("The answer broke off.", 200);
}

function told(answer, where, tell) {
  const choice = answer.choices[0];
  const said = choice?.[where] ?? {};
  tell({
    content: said.content ?? "",
    reasoning: said.reasoning_content ?? said.reasoning ?? "",
    tools: said.tool_calls ?? [],
    finish: choice?.finish_reason ?? null,
    usage: answer.usage ?? null,
  });
  return Boolean(choice?.finish_reason);
}
