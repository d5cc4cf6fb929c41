-- A gallery of format 1 as its own version left it: pg_dump --inserts.
--
-- PostgreSQL database dump
--



SET statement_timeout = 0;
SET lock_timeout = 0;
SET idle_in_transaction_session_timeout = 0;
SET transaction_timeout = 0;
SET client_encoding = 'UTF8';
SET standard_conforming_strings = on;
SELECT pg_catalog.set_config('search_path', '', false);
SET check_function_bodies = false;
SET xmloption = content;
SET client_min_messages = warning;
SET row_security = off;

--
-- Name: format1; Type: SCHEMA; Schema: -; Owner: -
--

CREATE SCHEMA format1;


SET default_tablespace = '';

SET default_table_access_method = heap;

--
-- Name: counter; Type: TABLE; Schema: format1; Owner: -
--

CREATE TABLE format1.counter (
    id integer NOT NULL,
    sequence bigint NOT NULL,
    number bigint NOT NULL,
    floor bigint NOT NULL,
    CONSTRAINT counter_id_check CHECK ((id = 1))
);


--
-- Name: facts; Type: TABLE; Schema: format1; Owner: -
--

CREATE TABLE format1.facts (
    key text NOT NULL,
    value text NOT NULL
);


--
-- Name: identities; Type: TABLE; Schema: format1; Owner: -
--

CREATE TABLE format1.identities (
    id bigint NOT NULL,
    name text NOT NULL COLLATE pg_catalog."C"
);


--
-- Name: identities_id_seq; Type: SEQUENCE; Schema: format1; Owner: -
--

ALTER TABLE format1.identities ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME format1.identities_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);


--
-- Name: removals; Type: TABLE; Schema: format1; Owner: -
--

CREATE TABLE format1.removals (
    number bigint NOT NULL,
    sequence bigint NOT NULL
);


--
-- Name: requests; Type: TABLE; Schema: format1; Owner: -
--

CREATE TABLE format1.requests (
    name text NOT NULL COLLATE pg_catalog."C",
    asked text NOT NULL,
    sequence bigint NOT NULL,
    numbers text NOT NULL
);


--
-- Name: templates; Type: TABLE; Schema: format1; Owner: -
--

CREATE TABLE format1.templates (
    number bigint NOT NULL,
    identity bigint NOT NULL,
    sequence bigint NOT NULL,
    crc bigint NOT NULL,
    vector public.vector(4) NOT NULL
);
ALTER TABLE ONLY format1.templates ALTER COLUMN vector SET STORAGE PLAIN;


--
-- Name: tombstones; Type: TABLE; Schema: format1; Owner: -
--

CREATE TABLE format1.tombstones (
    sequence bigint NOT NULL,
    person text NOT NULL,
    number bigint NOT NULL
);


--
-- Data for Name: counter; Type: TABLE DATA; Schema: format1; Owner: -
--

INSERT INTO format1.counter VALUES (1, 16, 21, 0);


--
-- Data for Name: facts; Type: TABLE DATA; Schema: format1; Owner: -
--

INSERT INTO format1.facts VALUES ('format', '1');
INSERT INTO format1.facts VALUES ('binding', '{"dim": 4, "fusion": "best", "metric": "cosine", "model": null, "preprocessing": null, "thresholds": {"0.001": {"measured_on": "validation identities", "threshold": 0.75}, "0.1": {"measured_on": "validation identities", "threshold": 0.25}}}');
INSERT INTO format1.facts VALUES ('salt', '1ca200718dfacacb8202b66ff29b0f523de00fa054db06206207f1853bc84c71');


--
-- Data for Name: identities; Type: TABLE DATA; Schema: format1; Owner: -
--

INSERT INTO format1.identities OVERRIDING SYSTEM VALUE VALUES (2, 'person 1');
INSERT INTO format1.identities OVERRIDING SYSTEM VALUE VALUES (3, 'person 2');
INSERT INTO format1.identities OVERRIDING SYSTEM VALUE VALUES (4, 'person 3');
INSERT INTO format1.identities OVERRIDING SYSTEM VALUE VALUES (5, 'person 4');
INSERT INTO format1.identities OVERRIDING SYSTEM VALUE VALUES (6, 'person 5');
INSERT INTO format1.identities OVERRIDING SYSTEM VALUE VALUES (7, 'person 6');
INSERT INTO format1.identities OVERRIDING SYSTEM VALUE VALUES (8, 'person 7');
INSERT INTO format1.identities OVERRIDING SYSTEM VALUE VALUES (9, 'person 8');
INSERT INTO format1.identities OVERRIDING SYSTEM VALUE VALUES (10, 'person 9');
INSERT INTO format1.identities OVERRIDING SYSTEM VALUE VALUES (11, 'person 10');
INSERT INTO format1.identities OVERRIDING SYSTEM VALUE VALUES (12, 'José');


--
-- Data for Name: removals; Type: TABLE DATA; Schema: format1; Owner: -
--

INSERT INTO format1.removals VALUES (1, 14);
INSERT INTO format1.removals VALUES (5, 15);
INSERT INTO format1.removals VALUES (6, 15);
INSERT INTO format1.removals VALUES (18, 16);


--
-- Data for Name: requests; Type: TABLE DATA; Schema: format1; Owner: -
--

INSERT INTO format1.requests VALUES ('r0', 'bd3953dfedfceffcbe8d56609cd38b156dfbbf061a8516328f29ffbce7035afb', 1, '[1]');
INSERT INTO format1.requests VALUES ('r1', '3b355bb158f865b87b8ee329510d1f5e81ec73300068d6bbd5e9d860f8aedd83', 2, '[2, 3]');
INSERT INTO format1.requests VALUES ('r2', '521fc999ed2753b7e43581d3bd05de69eb1f1191b782b5bed8c3165c02529980', 3, '[4]');
INSERT INTO format1.requests VALUES ('r3', 'fabbe3ac92b32724dd2bc2f540c08df33974bfff9d277eba4d1273a00fab6808', 4, '[5, 6]');
INSERT INTO format1.requests VALUES ('r4', 'c4855b1d78ec4adbee8e68a53013b1dd5f0cea1c6888b8f7c153ece054481b98', 5, '[7]');
INSERT INTO format1.requests VALUES ('r5', 'ad213e8c542212ac02d240732b009ae5580dbcbdf28fb1735d8ffc69b320babe', 6, '[8, 9]');
INSERT INTO format1.requests VALUES ('r6', '0a89f41e5fda057517da3896aa6a62ea29d962d783cfb14fb3dac12a2a6065bd', 7, '[10]');
INSERT INTO format1.requests VALUES ('r7', '09fa4104d8a1d72e05811e250760716ff05c9c88b954dce42cffd8299a285a15', 8, '[11, 12]');
INSERT INTO format1.requests VALUES ('r8', '366132bc3600bc4f03ce632a8c5dac0a128ab654c67b7d14233abff8b0665eee', 9, '[13]');
INSERT INTO format1.requests VALUES ('r9', '81e86d805ffd194a9865168a6113e9c599f5ff2b66e4602536c7442631b2a522', 10, '[14, 15]');
INSERT INTO format1.requests VALUES ('r10', '649be5bae54b52b144b5d3fc3481264bfc2c8b7b915c304a417b1fa69c4e9f2d', 11, '[16]');
INSERT INTO format1.requests VALUES ('enrol jose', '5d5efe3e7174d1250041cc16625fc1adfd097a00d9658fd91ac079ddb236302a', 12, '[17]');
INSERT INTO format1.requests VALUES ('enrol zoe', '0b19f384ef9ba669af62b3d2c0c08477a06ca733e1a63257f0184252665fda22', 13, '[18]');
INSERT INTO format1.requests VALUES ('d0', 'b954bc89614ee3671e963925842902bc6c00662f84be75607330ef4180b49412', 14, '[1]');
INSERT INTO format1.requests VALUES ('unnamed 2d9c907d1411543ad7df9e7dedb037c9', '62cbf876d51a4e048d29d2295b2060ae3da2ea701f753a2ed2375e03e67f6401', 15, '[19, 20]');
INSERT INTO format1.requests VALUES ('delete zoe', 'caefc8bffc3b49037ced4035ae29274ef1ec03c53b223e3d03ae4140ec06c937', 16, '[18]');


--
-- Data for Name: templates; Type: TABLE DATA; Schema: format1; Owner: -
--

INSERT INTO format1.templates VALUES (2, 2, 2, 4147382411, '[0.21424428,0.5093606,0.20485385,-0.8078899]');
INSERT INTO format1.templates VALUES (3, 2, 2, 3473815105, '[0.7059025,0.34803656,-0.4186604,0.4530956]');
INSERT INTO format1.templates VALUES (4, 3, 3, 3227804199, '[0.074495204,-0.20598549,-0.16276489,-0.9620437]');
INSERT INTO format1.templates VALUES (7, 5, 5, 3333536409, '[-0.34079862,-0.09135351,0.8699026,0.3446451]');
INSERT INTO format1.templates VALUES (8, 6, 6, 3204275041, '[-0.49397787,-0.8157855,-0.15298708,0.25898802]');
INSERT INTO format1.templates VALUES (9, 6, 6, 334639902, '[0.7617894,0.073564924,-0.3705842,-0.52624375]');
INSERT INTO format1.templates VALUES (10, 7, 7, 3012091140, '[0.32040384,0.54048634,-0.77682304,-0.041975003]');
INSERT INTO format1.templates VALUES (11, 8, 8, 1502084353, '[0.0012571213,0.30529478,-0.28014764,-0.91011584]');
INSERT INTO format1.templates VALUES (12, 8, 8, 3113647202, '[-0.26294807,-0.57349527,0.034782626,0.7750817]');
INSERT INTO format1.templates VALUES (13, 9, 9, 75883857, '[-0.6673592,-0.51316696,-0.52255917,-0.13499364]');
INSERT INTO format1.templates VALUES (14, 10, 10, 2344789308, '[-0.40771127,0.12332846,-0.8411555,0.33319512]');
INSERT INTO format1.templates VALUES (15, 10, 10, 1424452828, '[0.86175674,-0.34110767,0.3244331,0.18911387]');
INSERT INTO format1.templates VALUES (16, 11, 11, 4118294692, '[-0.70844644,-0.4655336,-0.5019921,0.17142347]');
INSERT INTO format1.templates VALUES (17, 12, 12, 3571212794, '[0.28876317,-0.2834262,0.3973849,-0.8236326]');
INSERT INTO format1.templates VALUES (19, 4, 15, 3299976232, '[-0.56510717,-0.19459376,0.43630615,-0.67262477]');
INSERT INTO format1.templates VALUES (20, 4, 15, 1574875734, '[-0.47505996,0.39980465,0.43941584,0.64914405]');


--
-- Data for Name: tombstones; Type: TABLE DATA; Schema: format1; Owner: -
--

INSERT INTO format1.tombstones VALUES (14, '50690961e6efb64db3401d34a5ad27567a2f3c906128bcdf48dda1201f03f07a', 19);
INSERT INTO format1.tombstones VALUES (15, 'aad4b78a96828fa3a494349e88704e7c5330b211fd45e13fef37af76f7dee8f8', 19);
INSERT INTO format1.tombstones VALUES (16, 'f41c6a6d98993f8ea8b4e18e27c14fc41fc775b7f4b61c2cd14c644db81cec4b', 21);


--
-- Name: identities_id_seq; Type: SEQUENCE SET; Schema: format1; Owner: -
--

SELECT pg_catalog.setval('format1.identities_id_seq', 13, true);


--
-- Name: counter counter_pkey; Type: CONSTRAINT; Schema: format1; Owner: -
--

ALTER TABLE ONLY format1.counter
    ADD CONSTRAINT counter_pkey PRIMARY KEY (id);


--
-- Name: facts facts_pkey; Type: CONSTRAINT; Schema: format1; Owner: -
--

ALTER TABLE ONLY format1.facts
    ADD CONSTRAINT facts_pkey PRIMARY KEY (key);


--
-- Name: identities identities_name_key; Type: CONSTRAINT; Schema: format1; Owner: -
--

ALTER TABLE ONLY format1.identities
    ADD CONSTRAINT identities_name_key UNIQUE (name);


--
-- Name: identities identities_pkey; Type: CONSTRAINT; Schema: format1; Owner: -
--

ALTER TABLE ONLY format1.identities
    ADD CONSTRAINT identities_pkey PRIMARY KEY (id);


--
-- Name: removals removals_pkey; Type: CONSTRAINT; Schema: format1; Owner: -
--

ALTER TABLE ONLY format1.removals
    ADD CONSTRAINT removals_pkey PRIMARY KEY (number);


--
-- Name: requests requests_pkey; Type: CONSTRAINT; Schema: format1; Owner: -
--

ALTER TABLE ONLY format1.requests
    ADD CONSTRAINT requests_pkey PRIMARY KEY (name);


--
-- Name: templates templates_pkey; Type: CONSTRAINT; Schema: format1; Owner: -
--

ALTER TABLE ONLY format1.templates
    ADD CONSTRAINT templates_pkey PRIMARY KEY (number);


--
-- Name: tombstones tombstones_pkey; Type: CONSTRAINT; Schema: format1; Owner: -
--

ALTER TABLE ONLY format1.tombstones
    ADD CONSTRAINT tombstones_pkey PRIMARY KEY (sequence, person);


--
-- Name: removals_sequence; Type: INDEX; Schema: format1; Owner: -
--

CREATE INDEX removals_sequence ON format1.removals USING btree (sequence);


--
-- Name: requests_sequence; Type: INDEX; Schema: format1; Owner: -
--

CREATE INDEX requests_sequence ON format1.requests USING btree (sequence);


--
-- Name: templates_identity; Type: INDEX; Schema: format1; Owner: -
--

CREATE INDEX templates_identity ON format1.templates USING btree (identity);


--
-- Name: templates_sequence; Type: INDEX; Schema: format1; Owner: -
--

CREATE INDEX templates_sequence ON format1.templates USING btree (sequence);


--
-- Name: templates templates_identity_fkey; Type: FK CONSTRAINT; Schema: format1; Owner: -
--

ALTER TABLE ONLY format1.templates
    ADD CONSTRAINT templates_identity_fkey FOREIGN KEY (identity) REFERENCES format1.identities(id);


--
-- PostgreSQL database dump complete
--
