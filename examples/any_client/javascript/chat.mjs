// A Vercel AI SDK chat as it was: of RAGCache it has the base URL alone. Run `npm ci` here, and curl.sh for the documents.
import { readFileSync } from "node:fs";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText } from "ai";

const { BASE_URL = "http://127.0.0.1:8000/v1", API_KEY = "none", MODEL = "demo_model" } = process.env;
const { documents } = JSON.parse(readFileSync(new URL("../documents.json", import.meta.url)));

const server = createOpenAICompatible({ name: "ragcache", baseURL: BASE_URL, apiKey: API_KEY });
// The retrieval of the app: the two documents that have most words of the question.
const wordsOf = (text) => text.toLowerCase().match(/\p{L}+/gu) ?? [];
function retrieve(question) {
  const asked = new Set(wordsOf(question));
  const score = ({ text }) => wordsOf(text).filter((word) => asked.has(word)).length;
  return [...documents].sort((one, other) => score(other) - score(one)).slice(0, 2);
}

const question = "Has Bella Skallal lived in Thimrixzirn?";
const context = retrieve(question).map((document) => `<doc>${document.text}</doc>`).join("\n");
const prompt = `Answer from the documents.\n\n${context}\n\nQuestion: ${question}`;
for (let time = 0; time < 2; time++) {
  const { usage } = await generateText({ model: server(MODEL), prompt, maxOutputTokens: 8 });
  console.log(JSON.stringify({ input: usage.inputTokens, cached: usage.cachedInputTokens ?? 0 }));
}
