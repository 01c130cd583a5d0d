// The parameters of a request: which there are, their inputs, and what the inputs say. Knows no server.

const NUMBER = (name, label, min, max, step) => ({ name, label, min, max, step });

const FIELDS = [
  NUMBER("temperature", "Temperature", 0, 2, 0.05),
  NUMBER("top_p", "Top p", 0, 1, 0.01),
  NUMBER("top_k", "Top k", -1, 1000000, 1),
  NUMBER("min_p", "Min p", 0, 1, 0.01),
  NUMBER("max_tokens", "Most tokens of an answer", 1, 10000000, 1),
  NUMBER("repetition_penalty", "Repetition penalty", 0.01, 10, 0.01),
  NUMBER("frequency_penalty", "Frequency penalty", -2, 2, 0.1),
  NUMBER("presence_penalty", "Presence penalty", -2, 2, 0.1),
  NUMBER("seed", "Seed", -9007199254740991, 9007199254740991, 1),
];
const STOP = { name: "stop", label: "Stop texts, one a line" };

export function build(into) {
  for (const field of FIELDS) into.append(labelled(field, input(field)));
  const stop = document.createElement("textarea");
  stop.rows = 2;
  into.append(labelled(STOP, stop));
}

function labelled(field, control) {
  const label = document.createElement("label");
  label.className = "field";
  control.id = `field-${field.name}`;
  label.append(`${field.label} `, control);
  return label;
}

function input(field) {
  const control = document.createElement("input");
  control.type = "number";
  // Any number within the range; the arrows go in steps.
  Object.assign(control, { min: field.min, max: field.max, step: field.step === 1 ? 1 : "any" });
  return control;
}

// {fields} of the body, or {problem} that names the input.
export function read() {
  const fields = {};
  for (const field of FIELDS) {
    const control = document.getElementById(`field-${field.name}`);
    if (!control.validity.valid) return { problem: `${field.label}: ${control.validationMessage}`, control };
    if (control.value !== "") fields[field.name] = control.valueAsNumber;
  }
  const stops = document.getElementById("field-stop").value.split("\n").filter(Boolean);
  if (stops.length) fields.stop = stops;
  const extra = document.getElementById("extra");
  if (extra.value.trim()) {
    try {
      const more = JSON.parse(extra.value);
      if (more === null || typeof more !== "object" || Array.isArray(more)) throw new Error("an object is expected");
      Object.assign(fields, more);
    } catch (error) {
      return { problem: `More fields: ${error.message}`, control: extra };
    }
  }
  return { fields };
}
