// A request as a command or a program for somewhere else. The key is left out.

export function code(kind, base, body, withKey) {
  const url = new URL("v1", base).href;
  return kind === "curl" ? curl(url, body, withKey) : python(url, body, withKey);
}

function curl(url, body, withKey) {
  const quoted = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  const key = withKey ? ' \\\n  -H "Authorization: Bearer $API_KEY"' : "";
  return `curl -N ${url}/chat/completions \\\n  -H "Content-Type: application/json"${key} \\\n  -d '${quoted}'\n`;
}

const SDK_KNOWS = ["model", "messages", "stream", "stream_options", "temperature", "top_p", "max_tokens", "stop",
  "frequency_penalty", "presence_penalty", "seed", "logprobs", "top_logprobs", "tools", "tool_choice",
  "response_format", "n", "logit_bias"];

function python(url, body, withKey) {
  const own = Object.entries(body).filter(([name]) => SDK_KNOWS.includes(name));
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => !SDK_KNOWS.includes(name)));
  if (Object.keys(extra).length) own.push(["extra_body", extra]);
  const fields = own.map(([name, value]) => `    ${name}=${literal(value)},\n`).join("");
  const loop = body.stream
    ? 'for chunk in answer:\n    if chunk.choices:\n        print(chunk.choices[0].delta.content or "", end="")\n'
    : "print(answer.choices[0].message.content)\n";
  const key = withKey ? 'os.environ["API_KEY"]' : '"none"';
  return `${withKey ? "import os\n\n" : ""}from openai import OpenAI\n\n`
    + `client = OpenAI(base_url=${literal(url)}, api_key=${key})\n`
    + `answer = client.chat.completions.create(\n${fields})\n${loop}`;
}

// JSON and Python write texts and numbers alike.
function literal(value) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "object") {
    return `{${Object.entries(value).map(([name, of]) => `${JSON.stringify(name)}: ${literal(of)}`).join(", ")}}`;
  }
  return JSON.stringify(value);
}
