"""The tables of a record in both dialects; `statements` says what stands in them.

Records are out there: whoever changes a table here must bring theirs along, and raise the format in `statements`.
"""

SQLITE = """
CREATE TABLE facts (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE counter (id INTEGER PRIMARY KEY CHECK (id = 1), sequence INTEGER NOT NULL, number INTEGER NOT NULL,
  floor INTEGER NOT NULL);
CREATE TABLE identities (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE templates (number INTEGER PRIMARY KEY, identity INTEGER NOT NULL REFERENCES identities (id),
  sequence INTEGER NOT NULL, crc INTEGER NOT NULL, vector BLOB NOT NULL);
CREATE INDEX templates_identity ON templates (identity);
CREATE INDEX templates_sequence ON templates (sequence);
CREATE TABLE removals (number INTEGER PRIMARY KEY, sequence INTEGER NOT NULL);
CREATE INDEX removals_sequence ON removals (sequence);
CREATE TABLE tombstones (sequence INTEGER NOT NULL, person TEXT NOT NULL, number INTEGER NOT NULL,
  PRIMARY KEY (sequence, person));
CREATE TABLE requests (name TEXT PRIMARY KEY, asked TEXT NOT NULL, sequence INTEGER NOT NULL, numbers TEXT NOT NULL);
CREATE INDEX requests_sequence ON requests (sequence);
"""

POSTGRES = """
CREATE TABLE facts (key text PRIMARY KEY, value text NOT NULL);
CREATE TABLE counter (id int PRIMARY KEY CHECK (id = 1), sequence int8 NOT NULL, number int8 NOT NULL,
  floor int8 NOT NULL);
CREATE TABLE identities (id int8 GENERATED ALWAYS AS IDENTITY PRIMARY KEY, name text COLLATE "C" NOT NULL UNIQUE);
CREATE TABLE templates (number int8 PRIMARY KEY, identity int8 NOT NULL REFERENCES identities (id),
  sequence int8 NOT NULL, crc int8 NOT NULL, vector vector({dim}) NOT NULL);
ALTER TABLE templates ALTER COLUMN vector SET STORAGE {storage};
CREATE INDEX templates_identity ON templates (identity);
CREATE INDEX templates_sequence ON templates (sequence);
CREATE TABLE removals (number int8 PRIMARY KEY, sequence int8 NOT NULL);
CREATE INDEX removals_sequence ON removals (sequence);
CREATE TABLE tombstones (sequence int8 NOT NULL, person text NOT NULL, number int8 NOT NULL,
  PRIMARY KEY (sequence, person));
CREATE TABLE requests (name text COLLATE "C" PRIMARY KEY, asked text NOT NULL, sequence int8 NOT NULL,
  numbers text NOT NULL);
CREATE INDEX requests_sequence ON requests (sequence);
"""
