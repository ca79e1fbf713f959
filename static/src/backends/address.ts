// The check of an address to install from. Pure; the server and the worker decide.

/** The source of a backend, its name, and a second name. */
export interface Address {
  uri: string;
  name: string;
  alias: string;
}

const NAME = /^[A-Za-z0-9][A-Za-z0-9._-]*$/;
const LONGEST_ADDRESS = 1024;
const LONGEST_NAME = 255;
const BARE_IMAGE = /^([a-z0-9-]+\.)+[a-z]+(:\d+)?\/[a-z0-9._/-]+(:\w[\w.-]*|@sha256:[0-9a-f]{64})$/;

/** True if it is an image in a registry. */
export function isImage(uri: string): boolean {
  return uri.startsWith("oci://") || BARE_IMAGE.test(uri);
}

/** Why it cannot be sent; "" if it can. */
export function addressProblem({ uri, name, alias }: Address): string {
  const where = uri.trim();
  if (where === "") return "Enter an address.";
  if (where.length > LONGEST_ADDRESS) return `Enter an address of at most ${LONGEST_ADDRESS} characters.`;
  if (!where.includes("://") && !where.startsWith("/") && !isImage(where)) return "Enter an image, a URL or a path that begins with /.";
  for (const entered of [name.trim(), alias.trim()]) {
    if (entered !== "" && (!NAME.test(entered) || entered.length > LONGEST_NAME)) return "Use only letters, digits, dots, hyphens and underscores in the name.";
  }
  return name.trim() === "" && isImage(where) ? "Enter a name. An image has no name of its own." : "";
}

/** The name of the installation, or else the address. */
export function keyOf(address: Address): string {
  return address.name !== "" ? address.name : address.uri;
}
