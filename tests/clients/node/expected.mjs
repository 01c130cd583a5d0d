// What the recordings say; see ../expected.py. Each file here is a test of node's own runner.
import { z } from "zod";

export const address = process.env.ADDRESS;
export const baseURL = `${address}/v1`;
export const apiKey = "sk-scripted";
export const model = "scripted";
export const HELLO = "Hello, wörld 👩‍👩‍👧! Then more.";
export const Person = z.object({ name: z.string(), age: z.number().int() });
export const ADA = { name: "Ada", age: 36 };
export const City = z.object({ city: z.string() });
export const CITY = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};
export const user = (content) => [{ role: "user", content }];
